#include "analysis/table_rows.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "analysis/skill.h"
#include "nearest.h"
#include "parameters.h"
#include "policies/text/policy_source.h"
#include "policies/twin.h"

namespace kvreplay {
namespace {

constexpr std::size_t most_policies = 10;
constexpr double undefined = std::numeric_limits<double>::quiet_NaN();
const MetricName pooled_error{"output_error", "pooled"}, error_of_heads{"output_error", ""},
    recall{"attention_recall", ""}, kept_tokens{"kept_tokens", ""};
constexpr const char* skill_title = "skill";

Error not_measured_live(const std::string& text) {
  return {Refusal::usage, "--columns", text + " is measured in the live model",
          "a run after kvreplay live RUN --model MODEL; kvreplay show RUN prints its numbers", "none"};
}

std::string three_digits(double value) { return fmt::format("{:.3f}", value); }
std::string one_digit(double value) { return fmt::format("{:.1f}", value); }
std::string kibibytes(double bytes) { return one_digit(bytes / 1024); }

TableColumn metric_column(const MetricName& name) {
  const std::string title = title_of(name), unit = unit_of(name);
  TableColumn column{.title = title.empty() ? name.text() : title,
                     .metric = (is_live(name) ? std::string(live_prefix) : "") + name.text(),
                     .better = better_of(name)};
  column.has_interval = unit != "s" && unit != "tokens" && unit != "bytes";
  column.value = [name](const CellRecord& cell) { return cell.value(name); };
  column.half_width = [name](const CellRecord& cell) { return cell.half_width(name); };
  column.text = unit == "tokens"  ? one_digit
                : unit == "bytes" ? kibibytes
                : unit == "s"     ? short_duration
                                  : three_digits;
  if (name == kept_tokens) column.value = [](const CellRecord& cell) { return cell.kept_tokens; };
  if (name == MetricName{"select_seconds", ""}) {
    column.value = [](const CellRecord& cell) { return cell.select_seconds(); };
    column.least_width = 9;  // "999.9 ms" and a mark: the layout of a table must not depend on how long it took
  }
  return column;
}

/// The policy that a text of the command line names, as replay records it: mine.py:my_policy is my_policy.
std::string recorded_policy(std::string_view name) {
  constexpr std::string_view python_file = ".py:";
  const std::size_t file = name.find(python_file);
  return file == std::string_view::npos ? registered_policy(name) : std::string(name.substr(file + python_file.size()));
}

/// Whether a text of the command line names the policy of a cell: its label, its name in any spelling that replay
/// takes, or NAME:KEY=VALUE, a preset or a press of kvpress, with values that the policy has.
bool names(const std::string& asked, const CellRecord& cell) {
  const std::string text = ConfiguredPolicy::without_preset(asked);
  if (text == cell.label || text == cell.policy) return true;
  const std::size_t end = end_of_policy_name(text);
  if (recorded_policy(std::string_view(text).substr(0, end)) != cell.policy) return false;
  if (end == text.size()) return true;
  const std::vector<std::string_view> own = split_list(cell.policy, cell.params);
  return std::ranges::all_of(split_list("--policy", std::string_view(text).substr(end + 1)),
                             [&](std::string_view value) { return std::ranges::find(own, value) != own.end(); });
}

/// The tokens of a budget of one trace, which spellings share: none for memory, and for budgets that grow.
std::optional<int> fixed_tokens(const CellRecord& cell) {
  const Budget budget = Budget::parse(cell.budget);
  return budget.bytes > 0 || budget.at_seen ? std::nullopt : std::optional(cell.budget_tokens);
}

/// The trace and budget of a cell, with one text for all spellings of the budget.
std::pair<std::string, std::string> place_of(const CellRecord& cell) {
  const std::optional<int> tokens = fixed_tokens(cell);
  return {cell.trace, tokens ? std::to_string(*tokens) : cell.budget};
}

/// Whether 10% and 0.1 are the two, or equal counts.
bool is_same_budget(const Budget& a, const Budget& b) {
  return std::abs(a.fraction - b.fraction) <= 1e-12 * a.fraction && a.count == b.count && a.bytes == b.bytes &&
         a.at_seen == b.at_seen;
}

/// Whether a text of the command line names the budget of a cell, in any spelling. `trace`: the only one of the run.
bool is_budget(const std::string& text, const CellRecord& cell, const TraceRecord* trace) {
  const Budget wanted = Budget::parse(text);
  if (is_same_budget(wanted, Budget::parse(cell.budget)) || wanted.count == cell.budget_tokens) return true;
  return trace != nullptr && wanted.bytes == 0 && !wanted.at_seen &&
         fixed_tokens(cell) == wanted.tokens(trace->boundary);
}

/// Throws Error{usage} for a text that names no item.
template <class Items, class Names>
void require_all(const char* option, const char* noun, const std::vector<std::string>& texts, const Items& items,
                 const Names& names_item, std::vector<std::string> (*known_names)(const typename Items::value_type&)) {
  for (const std::string& text : texts) {
    if (std::ranges::any_of(items, [&](const auto& item) { return names_item(text, item); })) continue;
    std::set<std::string> known;
    for (const auto& item : items)
      for (std::string& name : known_names(item)) known.insert(std::move(name));
    throw Error{Refusal::usage, option, fmt::format("unknown {}", noun),
                nearest(text, std::vector(known.begin(), known.end())), text};
  }
}

/// Whether one of the texts names the cell; without texts every cell is named.
template <class Names>
bool any_names(const std::vector<std::string>& texts, const CellRecord& cell, const Names& names_cell) {
  return texts.empty() || std::ranges::any_of(texts, [&](const std::string& text) { return names_cell(text, cell); });
}

bool is_trace(const std::string& text, const TraceRecord& trace) { return text == trace.name; }

/// A row a policy, the controls last. Of several traces, the cells of one policy are one row.
BudgetRows rows_at(const std::vector<const CellRecord*>& cells, bool several_traces) {
  BudgetRows budget{.budget = cells.front()->budget};
  std::map<std::tuple<std::string, std::string, std::uint64_t, std::string>, std::size_t> places;
  for (const CellRecord* cell : cells) {
    const auto [place, is_new] =
        places.emplace(std::tuple{cell->policy, cell->params, cell->seed, cell->source}, budget.rows.size());
    if (is_new || !several_traces) budget.rows.push_back({.facts = cell});
    PolicyRow& row = several_traces ? budget.rows[place->second] : budget.rows.back();
    if (cell->state != CellState::failed)
      row.cells.push_back(cell);
    else if (row.failed == nullptr)
      row.failed = cell;
  }
  std::vector<PolicyRow> controls;
  std::ranges::copy_if(budget.rows, std::back_inserter(controls), &PolicyRow::is_control);
  std::erase_if(budget.rows, [](const PolicyRow& row) { return row.is_control(); });
  budget.rows.insert(budget.rows.end(), controls.begin(), controls.end());
  return budget;
}

/// Whether two cells belong to one table: spellings of one budget, of one trace also those with equal tokens.
bool share_budget(const CellRecord& a, const CellRecord& b, bool several_traces) {
  if (is_same_budget(Budget::parse(a.budget), Budget::parse(b.budget))) return true;
  return !several_traces && fixed_tokens(a) && fixed_tokens(a) == fixed_tokens(b);
}

/// Traces without a cell are left out.
TracesRows rows_of(const RunSummary& summary, const std::vector<const TraceRecord*>& traces) {
  TracesRows part;
  std::vector<std::vector<const CellRecord*>> budgets;
  const bool several_traces = traces.size() > 1;
  for (const TraceRecord* trace : traces) {
    bool has_cell = false;
    for (const CellRecord& cell : summary.cells) {
      if (cell.trace != trace->name || (cell.role == "control" && cell.policy == random_twin_name)) continue;
      has_cell = true;
      const auto budget = std::ranges::find_if(budgets, [&](const std::vector<const CellRecord*>& cells) {
        return share_budget(*cells.front(), cell, several_traces);
      });
      (budget == budgets.end() ? budgets.emplace_back() : *budget).push_back(&cell);
    }
    if (has_cell) part.traces.push_back(trace);
  }
  for (const std::vector<const CellRecord*>& cells : budgets) part.budgets.push_back(rows_at(cells, several_traces));
  return part;
}

/// Whether some policy keeps fewer than all tokens of the first trace. At larger budgets all policies are equal.
bool evicts_tokens(const BudgetRows& budget, int boundary) {
  return std::ranges::any_of(budget.rows, [&](const PolicyRow& row) {
    return TableRows::is_compared(row) && row.facts->kept_tokens < boundary;
  });
}

/// Whether most policies select tokens. At smaller budgets protected tokens fill the budgets of the others.
bool most_select_tokens(const BudgetRows& budget) {
  std::ptrdiff_t selecting = 0, filled = 0;
  for (const PolicyRow& row : budget.rows)
    if (TableRows::is_compared(row))
      for (const CellRecord* cell : row.cells) ++(cell->protected_fill_budget ? filled : selecting);
  return selecting > filled;
}

/// How many cells of compared policies have live numbers.
std::ptrdiff_t live_cells(const BudgetRows& budget) {
  std::ptrdiff_t count = 0;
  for (const PolicyRow& row : budget.rows)
    if (TableRows::is_compared(row))
      count += std::ranges::count_if(row.cells, [](const CellRecord* cell) {
        return std::ranges::any_of(cell->values, [](const auto& one) { return is_live(one.first); });
      });
  return count;
}

std::vector<TracesRows> parts_of(const RunSummary& summary, bool each) {
  std::vector<const TraceRecord*> traces;
  for (const TraceRecord& trace : summary.traces)
    if (trace.error.empty()) traces.push_back(&trace);
  std::vector<TracesRows> parts;
  if (each)
    for (const TraceRecord* trace : traces) parts.push_back(rows_of(summary, {trace}));
  else
    parts.push_back(rows_of(summary, traces));
  std::erase_if(parts, [](const TracesRows& part) { return part.traces.empty(); });
  return parts;
}

}  // namespace

std::string short_duration(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.1f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

std::string prompt_of(const TraceRecord& trace) { return trace.prompt_hash.empty() ? trace.name : trace.prompt_hash; }

std::string heads_text(const PolicyRow& row, const TraceRecord& trace) {
  return row.facts->heads == "query" && trace.has_equal_heads()
             ? fmt::format("query {}x", trace.query_heads / std::max(1, trace.kv_heads))
             : row.facts->heads;
}

void check_columns(const std::vector<std::string>& columns, std::span<const MetricName> metrics, bool has_twins) {
  const std::vector<MetricName> measured = metrics_of_trace(metrics, {}, 0);
  for (const std::string& text : columns) {
    if (text == skill_title && has_twins) continue;
    if (text == skill_title) throw Error{Refusal::usage, "--columns", "skill needs random twins", "--controls twins"};
    const MetricName name = parse_metric("--columns", text);
    const bool is_of_cell = name == kept_tokens || unit_of(name) == "s";
    if (is_of_cell || std::ranges::find(measured, name) != measured.end()) continue;
    if (is_of_span(name) && std::ranges::find(metrics, name.metric, &MetricName::metric) != metrics.end()) continue;
    if (is_live(name)) throw not_measured_live(text);
    std::vector<std::string> known;
    for (const MetricName& one : metrics) known.push_back(one.text());
    throw Error{Refusal::usage, "--columns", "not among --metrics", nearest(name.text(), known), text};
  }
}

RunSummary selection(RunSummary summary, const TableOptions& options) {
  require_all("--trace", "trace", options.traces, summary.traces, is_trace,
              [](const TraceRecord& trace) { return std::vector{trace.name}; });
  require_all("--policy", "policy", options.policies, summary.cells, names, [](const CellRecord& cell) {
    return cell.policy == random_twin_name ? std::vector<std::string>{} : std::vector{cell.policy, cell.label};
  });
  const auto is_left_out = [&](const std::string& trace) {
    return !options.traces.empty() && std::ranges::find(options.traces, trace) == options.traces.end();
  };
  std::erase_if(summary.traces, [&](const TraceRecord& trace) { return is_left_out(trace.name); });
  std::erase_if(summary.cells, [&](const CellRecord& cell) { return is_left_out(cell.trace); });
  const auto names_budget = [only = summary.traces.size() == 1 ? &summary.traces.front() : nullptr](
                                const std::string& text, const CellRecord& cell) {
    return is_budget(text, cell, only);
  };
  require_all("--budget", "budget", options.budgets, summary.cells, names_budget,
              [](const CellRecord& cell) { return std::vector{cell.budget}; });
  std::erase_if(summary.cells, [&](const CellRecord& cell) {
    return !any_names(options.budgets, cell, names_budget) ||
           (cell.role != "control" && !any_names(options.policies, cell, names));
  });
  if (options.policies.empty() && options.budgets.empty()) return summary;
  std::set<std::pair<std::string, std::string>> places;  // of policies: controls elsewhere have nothing beside them
  for (const CellRecord& cell : summary.cells)
    if (cell.role != "control") places.insert(place_of(cell));
  std::erase_if(summary.cells, [&](const CellRecord& cell) { return !places.contains(place_of(cell)); });
  if (places.empty())
    throw Error{Refusal::usage, options.policies.empty() ? "--budget" : "--policy",
                "no cell at the selected budgets and traces",
                "policies and budgets that kvreplay show RUN --all lists"};
  return summary;
}

TableRows::TableRows(const RunSummary& summary, const TableOptions& options)
    : options_(options), skills_(kvreplay::skills(summary.cells)), parts_(parts_of(summary, options.each)) {
  for (const TraceRecord& trace : summary.traces) prompts_[trace.name] = prompt_of(trace);
  for (const CellRecord& cell : summary.cells)
    for (const auto& [name, values] : cell.values)
      if (is_live(name)) live_names_.insert(name);
  headline_ = metric_column(pooled_error);
  if (!is_measured(headline_)) headline_ = metric_column(recall);
  if (options.columns.empty()) {
    columns_ = measured_columns();
    return;
  }
  std::vector<std::string> missing;
  for (const std::string& text : options.columns) {
    columns_.push_back(column_of(text));
    if (is_measured(columns_.back())) continue;
    if (columns_.back().metric.starts_with(live_prefix) && live_names_.empty()) throw not_measured_live(text);
    missing.push_back(text);
  }
  if (missing.empty()) return;
  std::vector<std::string> known;
  for (const TableColumn& column : measured_columns()) known.push_back(column.title);
  const bool lacks_skill = std::ranges::find(missing, skill_title) != missing.end();
  throw Error{
      Refusal::usage, "--columns",
      lacks_skill ? "not measured in this run (skill needs replay --controls twins)" : "not measured in this run",
      missing.size() > 1 || lacks_skill ? fmt::format("some of {}", fmt::join(known, ", "))
                                        : nearest(missing.front(), known),
      fmt::format("{}", fmt::join(missing, ", "))};
}

TableColumn TableRows::column_of(const std::string& text) const {
  if (text == skill_title)
    return {.title = text,
            .metric = text,
            .better = Better::higher,
            .has_interval = true,
            .value =
                [this](const CellRecord& cell) {
                  const auto skill = skills_.find(cell.id);
                  return skill == skills_.end() ? undefined : skill->second;
                },
            .text = three_digits};
  return metric_column(parse_metric("--columns", text));
}

bool TableRows::is_measured(const TableColumn& column) const {
  for (const TracesRows& part : parts_)
    for (const BudgetRows& budget : part.budgets)
      for (const PolicyRow& row : budget.rows)
        if (std::isfinite(value(row, column).mean)) return true;
  return false;
}

/// Whether bytes say more than kept tokens do: not where a kept token takes as many in every cell.
bool TableRows::bytes_differ() const {
  double least = std::numeric_limits<double>::infinity(), most = 0;
  for (const TracesRows& part : parts_)
    for (const BudgetRows& budget : part.budgets)
      for (const PolicyRow& row : budget.rows)
        for (const CellRecord* cell : row.cells) {
          const double of_token = cell->value({"kv_bytes", ""}) / cell->kept_tokens;
          if (!std::isfinite(of_token)) continue;
          least = std::min(least, of_token);
          most = std::max(most, of_token);
        }
  return most > least * (1 + 1e-9);
}

/// The columns with a title that some cell has a value for. Of the output errors the pooled one, which orders policies
/// more like a live model (docs/closed-loop.md); in runs without it the mean over heads, under another title.
std::vector<TableColumn> TableRows::measured_columns() const {
  std::vector<std::string> titles = metric_titles();
  titles.insert(std::ranges::find(titles, title_of(recall)) + 1, skill_title);
  std::vector<TableColumn> columns;
  for (const std::string& title : titles) {
    if ((title == "KiB" && !bytes_differ()) || (title == skill_title && skills_.empty())) continue;
    TableColumn column = column_of(title);
    const bool has_pooled = title == title_of(error_of_heads) && is_measured(metric_column(pooled_error));
    // Times are always shown: 0 where nothing was selected.
    if (!has_pooled && (title == "select" || title == skill_title || is_measured(column))) columns.push_back(column);
  }
  for (const MetricName& name : variants_in_place_of_titles()) columns.push_back(metric_column(name));
  for (const MetricName& name : live_names_with_ways()) columns.push_back(metric_column(name));
  return columns;
}

/// The measured variants of each metric whose variant with a title was not measured: `--metrics
/// attention_recall:oracle` has no column `recall`.
std::set<MetricName> TableRows::variants_in_place_of_titles() const {
  std::set<std::string> with_title, measured;
  for (const std::string& title : metric_titles()) {
    const MetricName name = *find_title(title);
    if (is_live(name) || is_of_span(name)) continue;
    with_title.insert(name.metric);
    if (is_measured(metric_column(name))) measured.insert(name.metric);
  }
  std::set<MetricName> names;
  for (const TracesRows& part : parts_)
    for (const BudgetRows& budget : part.budgets)
      for (const PolicyRow& row : budget.rows)
        for (const CellRecord* cell : row.cells)
          for (const auto& [name, values] : cell->values)
            if (with_title.contains(name.metric) && !measured.contains(name.metric) && is_measured(metric_column(name)))
              names.insert(name);
  return names;
}

/// Of the live metrics with a title of their own: the names that tell how a number was measured.
std::set<MetricName> TableRows::live_names_with_ways() const {
  const std::vector<std::string> titles = metric_titles();
  std::set<MetricName> names;
  for (const MetricName& name : live_names_) {
    const auto is_of = [&](const MetricVariant& variant) {
      return !variant.name.empty() && name.variant.starts_with(variant.name);
    };
    if (find_variant(name) == nullptr && std::ranges::find(titles, title_of({name.metric, ""})) != titles.end() &&
        std::ranges::none_of(metrics().get(name.metric).variants, is_of))
      names.insert(name);
  }
  return names;
}

MeanInterval TableRows::value(const PolicyRow& row, const TableColumn& column) const {
  std::vector<double> values;
  std::vector<std::string> prompts;
  for (const CellRecord* cell : row.cells) {
    values.push_back(column.value(*cell));
    prompts.push_back(prompts_.at(cell->trace));
  }
  MeanInterval found = mean_interval(values, prompts);
  if (row.cells.size() == 1 && column.half_width) found.half_width = column.half_width(*row.cells.front());
  return found;
}

bool TableRows::is_compared(const PolicyRow& row) {
  return !row.is_control() && !row.has_failed() && !row.facts->own_memory;
}

/// A policy that does not beat its random twin is never marked.
bool TableRows::may_be_best(const PolicyRow& row) const {
  return is_compared(row) && !(value(row, column_of(skill_title)).mean <= 0);
}

const PolicyRow* TableRows::best(const TableColumn& column, std::span<const PolicyRow> rows) const {
  const PolicyRow* best_row = nullptr;
  double best = undefined;
  std::set<std::string> texts;  // equal ones have no best
  for (const PolicyRow& row : rows) {
    const double mean = value(row, column).mean;
    if (!is_compared(row) || !std::isfinite(mean)) continue;
    texts.insert(column.text(mean));
    if (!may_be_best(row) || (best_row != nullptr && !(column.better == Better::higher ? mean > best : mean < best)))
      continue;
    best_row = &row;
    best = mean;
  }
  return column.better == Better::neither || texts.size() < 2 ? nullptr : best_row;
}

std::vector<GridCell> TableRows::cells(const TableColumn& column, std::span<const PolicyRow> rows) const {
  const PolicyRow* const best_row = best(column, rows);
  std::vector<GridCell> cells;
  for (const PolicyRow& row : rows) {
    GridCell& cell = cells.emplace_back(GridCell{.value = value(row, column), .text = "-"});
    if (!std::isfinite(cell.value.mean)) continue;
    cell.text = column.text(cell.value.mean);
    if (!column.has_interval) cell.value.half_width = undefined;
    if (std::isfinite(cell.value.half_width)) cell.text += " ± " + column.text(cell.value.half_width);
    // As printed: what looks equal to the best is marked, too.
    cell.is_best = best_row != nullptr && may_be_best(row) &&
                   column.text(cell.value.mean) == column.text(value(*best_row, column).mean);
  }
  return cells;
}

bool TableRows::is_ranked(const PolicyRow& row) const {
  return is_compared(row) && std::isfinite(value(row, headline_).mean);
}

/// The best policies by the headline, best first, then others in their order, and the controls.
BudgetRows TableRows::shortened(const BudgetRows& all) const {
  BudgetRows some{.budget = all.budget};
  const double sign = headline_.better == Better::higher ? -1 : 1;
  std::multimap<double, PolicyRow> ranked;  // keeps the order of rows with equal values
  for (const PolicyRow& row : all.rows)
    if (is_ranked(row)) ranked.emplace(sign * value(row, headline_).mean, row);
  for (const auto& [key, row] : ranked) some.rows.push_back(row);
  std::ranges::copy_if(all.rows, std::back_inserter(some.rows),
                       [&](const PolicyRow& row) { return !row.is_control() && !is_ranked(row); });
  some.rows.resize(std::min(some.rows.size(), most_policies));
  std::ranges::copy_if(all.rows, std::back_inserter(some.rows), &PolicyRow::is_control);
  return some;
}

bool TableRows::shows_all() const { return options_.all || options_.format == TableFormat::csv; }

std::size_t TableRows::rest(const BudgetRows& all) const {
  const auto policies =
      static_cast<std::size_t>(std::ranges::count_if(all.rows, [](const PolicyRow& row) { return !row.is_control(); }));
  if (shows_all() || !options_.policies.empty() || policies <= most_policies) return 0;
  return policies - most_policies;
}

std::vector<BudgetRows> TableRows::tables(const TracesRows& part) const {
  const auto table_of = [this](const BudgetRows& budget) { return rest(budget) > 0 ? shortened(budget) : budget; };
  std::vector<BudgetRows> tables;
  if (!shows_all() && options_.budgets.empty()) {
    const int boundary = part.traces.front()->boundary;
    const auto evicts = [&](const BudgetRows& budget) { return evicts_tokens(budget, boundary); };
    const auto decides = [&](const BudgetRows& budget) { return evicts(budget) && most_select_tokens(budget); };
    auto first = std::ranges::max_element(part.budgets, {}, live_cells);
    if (live_cells(*first) == 0) first = std::ranges::find_if(part.budgets, decides);
    if (first == part.budgets.end()) first = std::ranges::find_if(part.budgets, evicts);
    tables.push_back(table_of(first == part.budgets.end() ? part.budgets.front() : *first));
    return tables;
  }
  std::ranges::transform(part.budgets, std::back_inserter(tables), table_of);
  return tables;
}

}  // namespace kvreplay
