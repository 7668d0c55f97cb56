#include "user_defaults.h"

#include <cstdlib>
#include <filesystem>
#include <set>
#include <string_view>
#include <vector>

#include "commands.h"
#include "error.h"
#include "nearest.h"
#include "policies/text/yaml_file.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view file_name = "kvreplay.yaml";

/// Empty: there is none.
fs::path find_file() {
  std::error_code problem;
  for (const fs::path other : {"kvreplay.toml", "kvreplay.yml"})
    if (fs::is_regular_file(other, problem))
      throw Error{Refusal::usage, other.string(), "not read", std::string(file_name) + ", lines KEY: VALUE"};
  for (fs::path folder = fs::current_path(problem); !folder.empty(); folder = folder.parent_path()) {
    if (fs::is_regular_file(folder / file_name, problem)) return folder / file_name;
    if (folder == folder.parent_path()) break;
  }
  const char* settings = std::getenv("XDG_CONFIG_HOME");
  const char* home = std::getenv("HOME");
  fs::path folder = settings == nullptr ? "" : settings;
  if (folder.empty() && home != nullptr) folder = fs::path(home) / ".config";
  const fs::path file = folder / "kvreplay" / file_name;
  return !folder.empty() && fs::is_regular_file(file, problem) ? file : fs::path();
}

std::set<std::string> options_with_user_defaults() {
  std::set<std::string> names;
  for (const Command* command : commands())
    for (const Option& option : command->options)
      if (option.has_user_default) names.insert(option.name);
  return names;
}

}  // namespace

std::map<std::string, GivenValue> read_user_defaults() {
  std::map<std::string, GivenValue> values;
  const fs::path file = find_file();
  if (file.empty()) return values;
  const YamlNode root = read_yaml(file, "defaults of options");
  const std::set<std::string> names = options_with_user_defaults();
  if (root.is(YamlNode::Kind::nothing)) return values;
  if (!root.is(YamlNode::Kind::mapping))
    throw Error{Refusal::usage, root.where, "not defaults of options", "lines KEY: VALUE", name_of(root.kind)};
  for (const auto& [key, node] : root.entries) {
    if (!names.contains(key))
      throw Error{Refusal::usage, node.where, "unknown key",
                  nearest(key, std::vector<std::string>(names.begin(), names.end())), key};
    if (!node.is(YamlNode::Kind::text) || node.text.empty())
      throw Error{Refusal::usage, node.where, key, "one value", name_of(node.kind)};
    values.emplace(key, GivenValue{node.text, node.where + ": " + key, node.where});
  }
  return values;
}

}  // namespace kvreplay
