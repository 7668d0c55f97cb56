#include "run_output.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "analysis/run_json.h"
#include "output.h"
#include "parameters.h"
#include "policies/text/configured.h"

namespace kvreplay {
namespace {

Json as_json(const RunSummary& summary) {
  Json document{{"output", summary.output.string()}, {"open_loop", true},       {"self_check", summary.self_check},
                {"warnings", summary.warnings},      {"traces", Json::array()}, {"cells", Json::array()}};
  for (const TraceRecord& trace : summary.traces) {
    Json& shown = document["traces"].emplace_back(input_json(trace));
    shown.update({{"query_heads", trace.query_heads},
                  {"kv_heads", trace.kv_heads},
                  {"observable_seconds", sum(trace.observable_seconds)}});
  }
  for (const CellRecord& cell : summary.cells) {
    Json values = Json::object(), live = Json::object();
    for (const auto& [name, value] : cell.values) {
      const double overall = cell.value(name);
      (is_live(name) ? live : values)[name.text()] = std::isnan(overall) ? Json() : Json(overall);
    }
    Json& shown = document["cells"].emplace_back(cell_json(cell));
    shown.update({{"label", cell.label},
                  {"heads", cell.heads},
                  {"kept_tokens", cell.kept_tokens},
                  {"select_seconds", cell.select_seconds()},
                  {"values", values}});
    if (!live.empty()) shown["live"] = live;
    for (const auto& [name, half_width] : cell.half_widths) shown["half_widths"][name.text()] = half_width;
  }
  return document;
}

/// The pieces of all values of an option; commas within parentheses are part of a policy.
std::vector<std::string> pieces(const Arguments& arguments, const char* option) {
  std::vector<std::string> all;
  for (const std::string& value : arguments.all(option))
    for (const std::string_view piece : split_list(std::string("--") + option, value)) all.emplace_back(piece);
  return all;
}

std::vector<std::string> policies_of(const Arguments& arguments) {
  std::vector<std::string> policies;
  for (const std::string& text : arguments.all("policy"))
    std::ranges::move(split_policies(text), std::back_inserter(policies));
  return policies;
}

}  // namespace

TableOptions table_options_of(const Arguments& arguments) {
  static constexpr std::pair<const char*, TableFormat> formats[] = {
      {"markdown", TableFormat::markdown}, {"latex", TableFormat::latex}, {"csv", TableFormat::csv}};
  TableOptions options{.columns = pieces(arguments, "columns"),
                       .all = arguments.given("all"),
                       .each = arguments.given("each"),
                       .wide = arguments.given("wide"),
                       .colour = uses_colour(arguments.text("color"))};
  std::string first = arguments.given(json_option.name) ? json_option.name : "";
  for (const auto& [name, format] : formats) {
    if (!arguments.given(name)) continue;
    if (!first.empty())
      throw Error{Refusal::usage, "--" + first, "two formats", "one of them", std::string("--") + name};
    first = name;
    options.format = format;
  }
  if (!options.columns.empty() && options.wide)
    throw Error{Refusal::usage, "--columns", "cannot be combined with --wide", "one of them"};
  return options;
}

TableOptions show_options_of(const Arguments& arguments) {
  TableOptions options = table_options_of(arguments);
  options.policies = policies_of(arguments);
  options.budgets = pieces(arguments, "budget");
  options.traces = pieces(arguments, "trace");
  return options;
}

void print_run(const Arguments& arguments, const TableOptions& options, const RunSummary& summary) {
  if (arguments.given(json_option.name))
    print_json(as_json(selection(summary, options)));
  else
    fmt::print("{}", table(summary, options));
}

}  // namespace kvreplay
