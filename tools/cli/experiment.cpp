#include "experiment.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>

#include "analysis/run.h"
#include "error.h"
#include "nearest.h"
#include "parameters.h"
#include "policies/text/policy_file.h"
#include "policies/text/policy_source.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;
using Kind = YamlNode::Kind;

/// Options of one start; an experiment is the same whenever it is started.
constexpr std::string_view of_one_start[] = {"force",   "watch",    "figure", "shard",
                                             "dry-run", "progress", "json",   "help"};

constexpr std::string_view traces_key = "traces";

bool is_experiment(std::string_view operand) {
  return operand.starts_with('@') && (operand.ends_with(".yaml") || operand.ends_with(".yml"));
}

/// Options by the keys that they have in a file.
std::map<std::string, const Option*> options_of(const Command& command) {
  std::map<std::string, const Option*> options;
  for (const Option& option : command.options)
    if (std::ranges::find(of_one_start, option.name) == std::end(of_one_start))
      for (const std::string_view name : {option.name, option.plural})
        if (!name.empty()) options[std::string(name)] = &option;
  return options;
}

void check_keys(const YamlNode& root, const std::map<std::string, const Option*>& options) {
  std::vector<std::string> known{std::string(traces_key)};
  for (const auto& [key, option] : options)
    if (*option->plural == '\0' || key == option->plural) known.push_back(key);
  std::string where, expected, found;
  for (const auto& [key, value] : root.entries) {
    if (key == traces_key || options.contains(key)) continue;
    const bool first = where.empty();
    if (first) where = value.where;
    expected += (first ? "" : expected.ends_with('?') ? " " : "; ") + nearest(key, known);
    found += first ? key : fmt::format("; {} at {}", key, value.where);
  }
  if (!where.empty()) throw Error{Refusal::usage, where, "unknown key", expected, found};
}

std::string one_text(const YamlNode& node, const std::string& key, const std::string& expected) {
  if (!node.is(Kind::text)) throw Error{Refusal::usage, node.where, key, expected, name_of(node.kind)};
  return node.text;
}

/// A text, or each of a list of them.
std::vector<YamlNode> texts(const YamlNode& node, const std::string& key) {
  const std::string expected = "one value, or a list of values";
  const std::vector<YamlNode> all = node.is(Kind::list) ? node.items : std::vector{node};
  if (all.empty()) throw Error{Refusal::usage, node.where, key, expected, "an empty list"};
  for (const YamlNode& one : all) one_text(one, key, expected);
  return all;
}

class File {
 public:
  File(const std::string& path, const Command& command)
      : path_(path), folder_(fs::path(path).parent_path()), root_(read_yaml(path, "an experiment")) {
    if (!root_.is(Kind::mapping))
      throw Error{Refusal::usage, root_.where, "not an experiment", "a mapping with the keys traces, policies, budgets",
                  name_of(root_.kind)};
    options_ = options_of(command);
    check_keys(root_, options_);
  }

  std::vector<ListedTrace> traces() const {
    const YamlNode* node = root_.find(traces_key);
    if (node == nullptr)
      throw Error{Refusal::usage, path_, "no trace", "the key traces, or traces on the command line beside @" + path_};
    std::vector<GivenValue> names;
    for (const YamlNode& name : texts(*node, std::string(traces_key)))
      names.push_back({name.text, name.where + ": " + std::string(traces_key), name.where});
    return list_traces(names, folder_);
  }

  void add_to(Arguments& arguments) const {
    const Arguments given = arguments;
    for (const auto& [key, node] : root_.entries) {
      if (key == traces_key) continue;
      const Option& option = *options_.at(key);
      if (!given.given(*option.target == '\0' ? option.name : option.target)) add(arguments, option, key, node);
    }
  }

 private:
  void add(Arguments& arguments, const Option& option, const std::string& key, const YamlNode& node) const {
    const std::string_view name = option.name;
    const auto give = [&](std::string text, const std::string& place) {
      arguments.add(name, {std::move(text), place + ": " + key, place});
    };
    const auto in_folder = [&](const std::string& file) { return (folder_ / file).string(); };
    if (name == "policy") {
      for (const PolicyText& policy : policies_of(node)) {
        const GivenValue value{policy.text, key, policy.where};
        give(at_place(value, [&] { return from_folder(value); }), value.place);
      }
    } else if (name == "exclude") {
      for (const PolicyText& exclusion : exclusions_of(node)) {
        const GivenValue value{exclusion.text, key, exclusion.where};
        give(at_place(value, [&] { return with_files_in(folder_, value.text); }), value.place);
      }
    } else if (*option.value == '\0') {
      const std::string flag = one_text(node, key, "true or false");
      if (flag != "true" && flag != "false") throw Error{Refusal::usage, node.where, key, "true or false", flag};
      if (flag == "true") give("", node.where);
    } else if (option.repeatable) {
      for (const YamlNode& one : texts(node, key)) give(name == "plugin" ? in_folder(one.text) : one.text, one.where);
    } else if (is_list(option.value)) {
      std::string all;
      for (const YamlNode& one : texts(node, key)) all += (all.empty() ? "" : ",") + one.text;
      give(std::move(all), node.where);
    } else {
      const std::string text = one_text(node, key, "one value");
      if (name == "output" && text.empty()) throw Error{Refusal::usage, node.where, key, "a folder", "\"\""};
      give(name == "output" ? in_folder(text) : text, node.where);
    }
  }

  /// The policies with the files that they name: lists of them are read, the others are found from anywhere.
  std::string from_folder(const GivenValue& policies) const {
    std::string all;
    const auto append = [&](std::string_view policy) {
      all += (all.empty() ? "" : ",") + with_files_in(folder_, policy);
    };
    for (const std::string_view piece : split_list(policies.where, policies.text)) {
      if (piece.starts_with('@'))
        std::ranges::for_each(policies_of_file(folder_ / piece.substr(1)), append);
      else
        append(piece);
    }
    return all;
  }

  std::string path_;
  fs::path folder_;
  YamlNode root_;
  std::map<std::string, const Option*> options_;
};

}  // namespace

Asked asked(const Arguments& arguments) {
  Asked all{arguments, {}};
  std::vector<GivenValue> traces;
  std::optional<File> file;
  for (const std::string& operand : arguments.operands()) {
    if (!is_experiment(operand)) {
      traces.push_back({operand, operand});
    } else if (file) {
      throw Error{Refusal::usage, operand, "second experiment file", "at most one"};
    } else {
      file.emplace(operand.substr(1), arguments.command());
    }
  }
  if (file) file->add_to(all.arguments);
  all.traces = file && traces.empty() ? file->traces() : list_traces(traces);
  // Every shard reports an error in the names of all traces.
  std::vector<fs::path> named;
  for (const ListedTrace& trace : all.traces) named.emplace_back(trace.path);
  check_names(named);
  if (all.arguments.given("shard"))
    all.traces = Shard::parse(all.arguments.values("shard").front().where, all.arguments.text("shard")).of(all.traces);
  std::vector<std::string> paths;
  for (const ListedTrace& trace : all.traces) paths.push_back(trace.path);
  all.arguments.replace_operands(std::move(paths));
  return all;
}

}  // namespace kvreplay
