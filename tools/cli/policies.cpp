#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/algorithm/string/replace.hpp>
#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "arguments.h"
#include "commands.h"
#include "output.h"
#include "policies/plan_part.h"
#include "policies/policy.h"
#include "policies/text/configured.h"
#include "policies/text/plugin.h"
#include "policy_facts.h"

namespace kvreplay {
namespace {

constexpr Option options[] = {
    {"parts", 0, "", "", "list parts of policies, and the parts that cannot be combined"},
    {"names", 0, "", "", "print only the names, one per line"},
    markdown_option,
    plugin_option,
    json_option,
};

std::string assignments(const Preset& preset) {
  std::string text;
  for (const auto& [key, value] : preset.values) text += (text.empty() ? "" : ",") + key + "=" + value;
  return text;
}

Json as_json(const ConfiguredPolicy& policy) {
  const Card& card = policy.card();
  Json document{{"name", card.name}, {"summary", card.summary}, {"paper", card.paper}, {"score", card.score}};
  document["family"] = word_of(card.family);
  document["parameters"] = Json::array();
  document["presets"] = Json::array();
  const PolicyFacts facts = facts_of(policy);
  document["granularity"] = facts.granularity;
  document["needs"] = facts.needs;
  document["class"] = facts.type;
  document["cost"] = facts.cost;
  const Parameters parameters = policy.parameters();
  for (const Parameter& parameter : parameters.all())
    document["parameters"].push_back({{"name", parameter.name},
                                      {"default", parameter.default_text},
                                      {"range", parameter.range},
                                      {"help", parameter.help}});
  for (const Preset& preset : parameters.presets())
    document["presets"].push_back({{"name", preset.name}, {"who", preset.who}, {"values", assignments(preset)}});
  return document;
}

/// Of a part or protection that the user has given, which has no default, its value.
std::string default_or_value(const Parameter& parameter) {
  return parameter.default_text.empty() ? parameter.value() : parameter.default_text;
}

void print_text(const ConfiguredPolicy& policy) {
  const Card& card = policy.card();
  const auto& [granularity, needs, type, cost] = facts_of(policy);
  std::vector<TableRow> rows{{"granularity", granularity}, {"needs", needs}, {"class", type}, {"cost", cost}};
  print_columns({{card.name, card.summary}});
  if (*card.paper != '\0') rows.insert(rows.begin(), {"paper", card.paper});
  if (*card.score != '\0') rows.insert(rows.begin(), {"score", card.score});
  print_columns(rows, 2);
  const Parameters parameters = policy.parameters();
  rows.clear();
  for (const Parameter& parameter : parameters.all())
    rows.push_back({parameter.name + "=" + default_or_value(parameter), parameter.range, parameter.help});
  print_columns(rows, 2);
  rows.clear();
  for (const Preset& preset : parameters.presets())
    rows.push_back({"preset=" + preset.name, assignments(preset), preset.who});
  print_columns(rows, 2);
}

void print_markdown(const ConfiguredPolicy& policy) {
  const Card& card = policy.card();
  fmt::print("### `{}`\n\n{}.", card.name, card.summary);
  if (*card.paper != '\0') fmt::print(" {}.", card.paper);
  if (*card.score != '\0') fmt::print("\n\n`{}`", card.score);
  const Parameters parameters = policy.parameters();
  fmt::print("\n");
  const auto print_section = [](const TableRow& heads, const std::vector<TableRow>& rows,
                                const std::set<std::size_t>& code) {
    if (rows.empty()) return;
    fmt::print("\n");
    print_markdown_table(heads, rows, code);
  };
  std::vector<TableRow> rows, presets;
  for (const Parameter& parameter : parameters.all())
    rows.push_back({parameter.name, default_or_value(parameter), parameter.range, parameter.help});
  for (const Preset& preset : parameters.presets()) presets.push_back({preset.name, assignments(preset), preset.who});
  print_section({"parameter", "default", "range", "meaning"}, rows, {0});
  print_section({"preset", "values", "source"}, presets, {0, 1});
}

/// Whether some policy accepts both parts, KIND=NAME each.
bool fit_together(const std::string& one, const std::string& other) {
  constexpr int some_layers = 4;
  return std::ranges::any_of(policies().names(), [&](const std::string& policy) {
    try {
      ConfiguredPolicy::parse(policy + ":" + one + "," + other).plans(some_layers);
      return true;
    } catch (const Error&) {
      return false;
    }
  });
}

/// Of each part, the parts of other kinds that no policy accepts beside it.
std::map<std::string, std::vector<std::string>> misfits() {
  std::vector<std::pair<PartKind, std::string>> all;
  for (const Choice<PartKind>& kind : part_kinds)
    for (const std::string& name : parts(kind.value).names())
      all.emplace_back(kind.value, fmt::format("{}={}", kind.word, name));
  std::map<std::string, std::vector<std::string>> found;
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t j = i + 1; j < all.size(); ++j) {
      const auto& [kind, one] = all[i];
      const auto& [other_kind, other] = all[j];
      if (kind == other_kind || fit_together(one, other)) continue;
      found[one].push_back(other);
      found[other].push_back(one);
    }
  return found;
}

/// The parts of each kind under its name; a part's parameters and their defaults behind its summary. Rows of kind,
/// name, summary, parameters.
void print_parts(const std::vector<TableRow>& rows) {
  for (auto next = rows.begin(); next != rows.end();) {
    const std::string kind = next->front();
    std::vector<TableRow> lines;
    for (; next != rows.end() && next->front() == kind; ++next) {
      const std::string& values = (*next)[3];
      const std::string shown = values.empty() ? "" : " (" + boost::replace_all_copy(values, ",", ", ") + ")";
      lines.push_back({(*next)[1], (*next)[2] + shown});
    }
    fmt::print("{}=\n", kind);
    print_columns(lines, 2);
  }
}

int list_parts(const Arguments& arguments) {
  Json document = Json::array();
  std::vector<TableRow> rows;
  const auto not_with = misfits();
  for (const Choice<PartKind>& kind : part_kinds)
    for (const std::string& name : parts(kind.value).names()) {
      const PartCard& card = parts(kind.value).get(name);
      const auto part = card.make();
      const Parameters parameters = part->parameters();
      const auto found = not_with.find(fmt::format("{}={}", kind.word, name));
      const std::vector<std::string> misfit = found == not_with.end() ? std::vector<std::string>() : found->second;
      document.push_back({{"name", name},
                          {"kind", kind.word},
                          {"summary", card.summary},
                          {"parameters", parameters.canonical()},
                          {"not_with", misfit}});
      rows.push_back(
          {kind.word, name, card.summary, parameters.canonical(), fmt::format("{}", fmt::join(misfit, " "))});
    }
  if (arguments.given("json")) {
    print_json(document);
  } else if (arguments.given("markdown")) {
    for (TableRow& row : rows) row.front() += "=";
    print_markdown_table({"kind", "part", "function", "parameters", "not combined with"}, rows, {0, 1, 3, 4});
  } else {
    std::vector<TableRow> apart;
    for (const auto& [part, others] : not_with) apart.push_back({part, fmt::format("{}", fmt::join(others, " "))});
    print_parts(rows);
    fmt::print("\nParts that cannot be combined:\n");
    print_columns(apart, 2);
  }
  return 0;
}

/// By family, and by name within it.
std::vector<ConfiguredPolicy> by_family() {
  std::vector<ConfiguredPolicy> all;
  for (const std::string& name : policies().names()) all.push_back(ConfiguredPolicy::with_defaults(name));
  std::ranges::sort(all, {}, [](const ConfiguredPolicy& policy) {
    return std::pair(policy.card().family, std::string_view(policy.card().name));
  });
  return all;
}

int list_names() {
  for (const ConfiguredPolicy& policy : by_family()) fmt::print("{}\n", policy.card().name);
  return 0;
}

/// A table for each family, under a heading.
void print_markdown(const std::vector<ConfiguredPolicy>& all) {
  for (auto next = all.begin(); next != all.end();) {
    const Family family = next->card().family;
    fmt::print("{}### {}\n\n", next == all.begin() ? "" : "\n", capitalised(word_of(family)));
    std::vector<TableRow> rows;
    for (; next != all.end() && next->card().family == family; ++next) {
      const auto& [granularity, needs, type, cost] = facts_of(*next);
      rows.push_back({next->card().name, next->card().summary, next->card().paper, granularity, needs, type, cost});
    }
    print_markdown_table({"policy", "description", "paper", "granularity", "needs", "class", "cost"}, rows);
  }
}

/// The policies of each family under its name, without papers: lines that fit a narrow terminal.
void print_narrow(const std::vector<ConfiguredPolicy>& all) {
  for (auto next = all.begin(); next != all.end();) {
    const Family family = next->card().family;
    std::vector<TableRow> rows;
    for (; next != all.end() && next->card().family == family; ++next)
      rows.push_back({next->card().name, next->card().summary});
    fmt::print("{}\n", word_of(family));
    print_columns(rows, 2);
  }
}

int list_policies(const Arguments& arguments) {
  constexpr std::size_t widest = 240;  // of a line with family, name, description and paper
  const std::vector<ConfiguredPolicy> all = by_family();
  const bool json = arguments.given(json_option.name);
  if (!json && arguments.given("markdown")) {
    print_markdown(all);
    return 0;
  }
  if (!json && page_width() < widest) {
    print_narrow(all);
    return 0;
  }
  Json document = Json::array();
  std::vector<TableRow> rows;
  std::string family;
  for (const ConfiguredPolicy& policy : all) {
    document.push_back(as_json(policy));
    const Card& card = policy.card();
    rows.push_back({family == word_of(card.family) ? "" : word_of(card.family), card.name, card.summary, card.paper});
    family = word_of(card.family);
  }
  print_list(arguments, document, {"family", "policy", "description", "paper"}, rows, {1});
  return 0;
}

int run(const Arguments& arguments) {
  for (const std::string& file : arguments.all(plugin_option.name)) load_plugin(file);
  if (arguments.given("parts")) {
    if (!arguments.operands().empty())
      throw Error{Refusal::usage, "--parts", "lists all parts; it takes no policy", "no argument",
                  arguments.operands().front()};
    return list_parts(arguments);
  }
  if (arguments.given("names")) return list_names();
  if (arguments.operands().empty()) return list_policies(arguments);
  const std::string name{arguments.operands().front()};
  const ConfiguredPolicy policy = ConfiguredPolicy::parse(name);
  if (arguments.given("json"))
    print_json(as_json(policy));
  else if (arguments.given("markdown"))
    print_markdown(policy);
  else
    print_text(policy);
  return 0;
}

}  // namespace

const Command policies_command{"policies",
                               "lists policies, or prints the card of one: paper, score, parameters",
                               "[POLICY]",
                               options,
                               run,
                               nullptr,
                               "kvreplay policies\nkvreplay policies snapkv\n"};

}  // namespace kvreplay
