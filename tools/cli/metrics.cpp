#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "analysis/metrics/metric.h"
#include "arguments.h"
#include "commands.h"
#include "output.h"

namespace kvreplay {
namespace {

constexpr Option options[] = {
    markdown_option,
    json_option,
};

std::string full_name(const MetricCard& card, const MetricVariant& variant) {
  return MetricName{card.name, variant.name}.text();
}

/// What the variant measures, and its unit and direction where they are not the metric's.
std::string meaning(const MetricCard& card, const MetricVariant& variant) {
  const std::string& unit = unit_of(card, variant);
  const Better better = better_of(card, variant);
  return variant.summary + (unit == card.unit ? "" : fmt::format("; unit: {}", unit)) +
         (better == card.better ? "" : fmt::format("; better: {}", word(better)));
}

Json as_json(const MetricCard& card) {
  Json document{{"name", card.name},           {"summary", card.summary}, {"unit", card.unit},
                {"better", word(card.better)}, {"formula", card.formula}, {"source", card.source},
                {"edges", card.edges},         {"live", is_live(card)}};
  document["variants"] = Json::array();
  for (const MetricVariant& variant : card.variants)
    document["variants"].push_back({{"name", full_name(card, variant)},
                                    {"summary", variant.summary},
                                    {"by_default", variant.by_default},
                                    {"unit", unit_of(card, variant)},
                                    {"better", word(better_of(card, variant))}});
  return document;
}

/// Of each variant its name, whether it is measured `by_default`, and its meaning.
std::vector<TableRow> variant_rows(const MetricCard& card, const char* by_default) {
  std::vector<TableRow> rows;
  for (const MetricVariant& variant : card.variants)
    rows.push_back({full_name(card, variant),
                    is_live(card)        ? "by kvreplay live"
                    : variant.by_default ? by_default
                                         : "on request",
                    meaning(card, variant)});
  return rows;
}

void print_text(const MetricCard& card) {
  print_columns({{card.name, card.summary}});
  print_columns({{"unit", card.unit},
                 {"better", word(card.better)},
                 {"formula", card.formula},
                 {"source", card.source},
                 {"edges", card.edges}},
                2);
  print_columns(variant_rows(card, "default"), 2);
}

void print_markdown(const MetricCard& card) {
  fmt::print("### `{}`\n\n{}. Unit: {}. Source: {}. Edges: {}.\n\n`{}`\n\n", card.name, card.summary, card.unit,
             card.source, card.edges, card.formula);
  print_markdown_table({"variant", "measured", "meaning"}, variant_rows(card, "by default"));
}

int list(const Arguments& arguments) {
  Json document = Json::array();
  std::vector<TableRow> rows;
  for (const std::string& name : metrics().names()) {
    const MetricCard& card = metrics().get(name);
    document.push_back(as_json(card));
    rows.push_back({name, card.unit, card.summary});
  }
  print_list(arguments, document, {"metric", "unit", "meaning"}, rows);
  return 0;
}

int run(const Arguments& arguments) {
  if (arguments.operands().empty()) return list(arguments);
  const std::string& name = arguments.operands().front();
  const bool has_variant = name.find(':') != std::string::npos;
  const std::optional<MetricName> titled = has_variant ? parse_metric("metrics", name) : find_title(name);
  const MetricCard& card = metric_card(titled ? titled->metric : name);
  if (arguments.given("json"))
    print_json(as_json(card));
  else if (arguments.given("markdown"))
    print_markdown(card);
  else
    print_text(card);
  return 0;
}

}  // namespace

const Command metrics_command{"metrics",
                              "lists metrics, or prints the definition, formula and source of one",
                              "[METRIC]",
                              options,
                              run,
                              nullptr,
                              "kvreplay metrics\nkvreplay metrics attention_recall\n"};

}  // namespace kvreplay
