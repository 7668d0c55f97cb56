#include "policies/policy_file.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include "error.h"
#include "parameters.h"
#include "policies/policy_source.h"

namespace kvreplay {
namespace {

std::string where(const std::filesystem::path& path, const YAML::Mark& mark) {
  return mark.is_null() ? path.string() : fmt::format("{}:{}", path.string(), mark.line + 1);
}

std::string policy_of(const std::filesystem::path& path, const YAML::Node& node) {
  if (node.IsScalar()) return node.Scalar();
  if (!node.IsMap() || !node["policy"] || !node["policy"].IsScalar())
    throw Error{Refusal::usage, where(path, node.Mark()), "not a policy", "a text, or a mapping with the key policy",
                node.IsMap() ? "a mapping without it" : "something else"};
  std::string text = node["policy"].Scalar();
  bool first = end_of_policy_name(text) == text.size();
  for (const auto& entry : node) {
    const std::string key = entry.first.Scalar();
    if (key == "policy") continue;
    if (!entry.second.IsScalar())
      throw Error{Refusal::usage, where(path, entry.second.Mark()), "value of " + key, "one word, number or text",
                  entry.second.IsSequence() ? "a list" : "something else"};
    text += (first ? ":" : ",") + key + "=" + list_value(entry.second.Scalar());
    first = false;
  }
  return text;
}

}  // namespace

std::vector<std::string> policies_of_file(const std::filesystem::path& path) {
  YAML::Node root;
  try {
    root = YAML::LoadFile(path.string());
  } catch (const YAML::BadFile&) {
    throw Error{Refusal::input, path.string(), "cannot be read", "a file of policies"};
  } catch (const YAML::Exception& problem) {
    throw Error{Refusal::usage, where(path, problem.mark), "not YAML", "policies", problem.msg};
  }
  std::vector<std::string> all;
  if (root.IsSequence()) {
    for (const YAML::Node& node : root) all.push_back(policy_of(path, node));
  } else if (root.IsDefined() && !root.IsNull()) {
    all.push_back(policy_of(path, root));
  }
  if (all.empty()) throw Error{Refusal::usage, path.string(), "holds no policy", "one policy, or a list of them"};
  return all;
}

}  // namespace kvreplay
