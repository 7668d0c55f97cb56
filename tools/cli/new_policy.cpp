#include <fmt/format.h>

#include <algorithm>
#include <boost/algorithm/string/replace.hpp>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "analysis/replaced_file.h"
#include "arguments.h"
#include "commands.h"
#include "error.h"
#include "machine.h"
#include "new_policy_texts.h"
#include "policies/policy.h"
#include "policies/text/layer_ranges.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;

constexpr Option options[] = {
    {"source", 0, "DIR", "", "kvreplay's source folder; default: the current folder, or one above it"},
    {"plugin", 0, "", "", "a separate project in the folder NAME, to be compiled without kvreplay's sources"},
};

struct File {
  fs::path path;
  std::string text;
};

/// "my-policy" as C++ names it: "my_policy", and for a type "MyPolicyPolicy", which nothing else is called.
std::string file_name(std::string name) {
  std::ranges::replace(name, '-', '_');
  return name;
}

std::string type_name(const std::string& name) {
  std::string type;
  for (const std::string& word : split(name, '-')) type += capitalised(word);
  return type + "Policy";
}

/// A text of new_policy/ for the policy of this name.
std::string filled(std::string_view text, const std::string& name) {
  std::string result{text};
  const std::pair<std::string_view, std::string> places[] = {
      {"@name@", name}, {"@file@", file_name(name)}, {"@Type@", type_name(name)}};
  for (const auto& [place, value] : places) boost::replace_all(result, place, value);
  return result;
}

void check_name(const std::string& name) {
  if (!is_name(name)) throw Error{Refusal::usage, "new-policy", "invalid policy name", name_rule, "\"" + name + "\""};
  if (policies().find(name) != nullptr || name == layer_ranges_name)
    throw Error{Refusal::usage, "new-policy", "a policy with this name exists", "another name", name};
}

const fs::path papers = fs::path("core") / "policies" / "papers";

fs::path source_folder(const Arguments& arguments) {
  if (arguments.given("source")) {
    const fs::path folder = arguments.text("source");
    if (!fs::is_directory(folder / papers))
      throw Error{Refusal::usage, "--source", "not kvreplay's source folder", "a folder with " + papers.string(),
                  folder.string()};
    return folder;
  }
  const fs::path here = fs::current_path();
  for (fs::path folder = here;; folder = folder.parent_path()) {
    if (fs::is_directory(folder / papers)) return folder.lexically_proximate(here);
    if (folder == folder.parent_path()) break;
  }
  throw Error{Refusal::usage, "new-policy", "not in kvreplay's source folder",
              "--source DIR, or --plugin, or a policy in Python (-p FILE.py:NAME, docs/writing-policies.md)",
              here.string()};
}

void write(const std::vector<File>& files) {
  for (const File& file : files)
    if (fs::exists(fs::symlink_status(file.path)))
      throw Error{Refusal::usage, file.path.string(), "exists", "another name"};
  for (const File& file : files) {
    std::error_code problem;
    fs::create_directories(file.path.parent_path(), problem);
    if (problem)
      throw Error{Refusal::usage, file.path.parent_path().string(), "cannot be created", "", problem.message()};
    replace_file(file.path, file.text);
    fmt::print("{}\n", file.path.string());
  }
}

/// Where the kit of this program is: beside it as it was built, or installed with it.
std::optional<fs::path> kit_folder() {
  const fs::path folder = program_folder();
  for (const fs::path& candidate : {folder / "kit", folder.parent_path()})
    if (candidate.is_absolute() && fs::exists(candidate / "share/cmake/kvreplay/kvreplayConfig.cmake"))
      return candidate;
  return std::nullopt;
}

void write_plugin(const std::string& name) {
  constexpr std::string_view targets[] = {"all", "clean", "help", "install", "preinstall"};
  if (std::ranges::find(targets, name) != std::end(targets))
    throw Error{Refusal::usage, "new-policy", "reserved for a target of CMake", "another name", name};
  const fs::path folder = name;
  write({{folder / (file_name(name) + ".cpp"), filled(policy_text, name)},
         {folder / "CMakeLists.txt", filled(plugin_project_text, name)}});
  const std::optional<fs::path> kit = kit_folder();
  const std::string root = kit ? fmt::format(" -Dkvreplay_ROOT='{}'", kit->string()) : "";
  fmt::print(
      "\ncmake -S {0} -B {0}/build{1} && cmake --build {0}/build\n"
      "kvreplay replay TRACE --plugin {0}/build/{0}.so -p {0} -b 0.1\n",
      name, root);
}

void write_source(const std::string& name, const fs::path& source) {
  const std::string file = file_name(name);
  const fs::path tests = source / "tests" / "unit";
  write({{(source / papers / (file + ".cpp")).lexically_normal(), filled(policy_text, name)},
         {(tests / (file + "_policy.cpp")).lexically_normal(), filled(policy_test_text, name)}});
  fmt::print(
      "\ntools/setup build checks && cmake --preset release\n"
      "cmake --build --preset release --target kvreplay unit_tests laws && ctest --preset release -R {}\n"
      "kvreplay replay traces/smollm2-135m-needle.h5 -p {} -b 0.1\n",
      file, name);
}

int run(const Arguments& arguments) {
  const std::string& name = arguments.operands().front();
  check_name(name);
  if (arguments.given("plugin") && arguments.given("source"))
    throw Error{Refusal::usage, "new-policy", "--source and --plugin are contradictory", "one of the two"};
  if (arguments.given("plugin"))
    write_plugin(name);
  else
    write_source(name, source_folder(arguments));
  return 0;
}

}  // namespace

const Command new_policy_command{
    "new-policy", "writes the source of a working policy, with its test, to start from",     "NAME", options, run,
    nullptr,      "kvreplay new-policy my-policy\nkvreplay new-policy my-policy --plugin\n", true};

}  // namespace kvreplay
