#include "analysis/table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/algorithm/string.hpp>
#include <cctype>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <set>
#include <span>
#include <tuple>
#include <utility>

#include "analysis/table_formats.h"
#include "analysis/table_rows.h"

namespace kvreplay {
namespace {

constexpr std::size_t few_prompts = 5;  // fewer give intervals that say little
constexpr std::size_t narrow_width = 80, wide_width = 150;
constexpr std::size_t longest_name = 42;         // of a policy
constexpr std::size_t most_in_one_family = 12;   // more rows than these are read family by family
constexpr std::size_t most_in_budgets_grid = 4;  // policies: more would not fit one screen
constexpr std::size_t indent = 11;               // of the lines below a table
/// The order in which columns get a place in a narrow table.
constexpr const char* by_importance[] = {
    "kept",   "out.err",  "head.err", "live.kld", "live.answer", "recall",  "KiB",   "skill", "select",    "needle",
    "answer", "question", "out.cos",  "att.l1",   "att.cos",     "jaccard", "kv.l1", "held",  "live.top1", "live.nll"};

/// Characters, not bytes.
std::size_t length(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
}

std::string left(const std::string& text, std::size_t width) {
  return text + std::string(width - std::min(width, length(text)), ' ');
}

std::string right(const std::string& text, std::size_t width) {
  return std::string(width - std::min(width, length(text)), ' ') + text;
}

std::string cut(const std::string& text, std::size_t width) {
  if (text.size() <= width) return text;
  std::size_t end = width - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
  return text.substr(0, end) + "...";
}

std::string trimmed(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

/// The pieces in lines of at most `width` characters behind `label`. A line that goes on ends with the separator.
std::string wrapped(const std::string& label, const std::vector<std::string>& pieces, const std::string& separator,
                    std::size_t width, std::size_t margin) {
  std::string text, line = left(label, margin);
  const std::size_t end = trimmed(separator).size();
  bool is_first = true;
  for (const std::string& piece : pieces) {
    const std::size_t further = &piece == &pieces.back() ? 0 : end;
    if (!is_first && length(line) + separator.size() + length(piece) + further > width) {
      text += trimmed(line + separator) + '\n';
      line = std::string(margin, ' ');
      is_first = true;
    }
    line += (is_first ? "" : separator) + piece;
    is_first = false;
  }
  return text + trimmed(line) + '\n';
}

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words{""};
  for (const char c : text) c == ' ' ? words.emplace_back() : words.back() += c;
  return words;
}

std::string grouped(long number) {
  std::string digits = std::to_string(number);
  for (std::size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, " ");
  return digits;
}

/// "480", or "402 to 2 011".
template <class Number>
std::string range_of(const std::vector<const TraceRecord*>& traces, Number number) {
  const auto [least, most] = std::ranges::minmax(traces, {}, number);
  const long from = std::invoke(number, least), to = std::invoke(number, most);
  return from == to ? std::to_string(from) : fmt::format("{} to {}", grouped(from), grouped(to));
}

/// A bold or dim text on a terminal.
struct Colours {
  bool on;
  std::string bold(const std::string& text) const { return on ? "\x1b[1m" + text + "\x1b[0m" : text; }
  std::string dim(const std::string& text) const { return on ? "\x1b[2m" + text + "\x1b[0m" : text; }
};

/// A path as a word of a shell.
std::string shell_word(const std::string& path) {
  const auto is_plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) ||
           std::string_view("_./-+=:@%").find(c) != std::string_view::npos;
  };
  if (!path.empty() && std::ranges::all_of(path, is_plain)) return path;
  std::string quoted = "'";
  for (const char c : path) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

/// The columns of a table and their places.
struct Layout {
  std::size_t width = narrow_width;  // of all lines
  std::size_t name = 0;
  std::size_t heads = 0;  // 0: the granularity is the same in all rows, and is not shown
  std::vector<TableColumn> columns = {};
  std::vector<std::size_t> widths = {};
  std::vector<std::string> omitted = {};  // titles of columns that do not fit
};

/// All tables of a text.
using Tables = std::vector<std::pair<const TracesRows*, std::vector<BudgetRows>>>;

Tables tables_of(const TableRows& rows) {
  Tables tables;
  for (const TracesRows& part : rows.parts()) tables.emplace_back(&part, rows.tables(part));
  return tables;
}

std::size_t width_of(const TableRows& rows, const TableColumn& column, const Tables& tables) {
  std::size_t width = std::max(column.title.size() + 1, column.least_width);
  for (const auto& [part, budgets] : tables)
    for (const BudgetRows& budget : budgets)
      for (const GridCell& cell : rows.cells(column, budget.rows)) width = std::max(width, length(cell.text) + 1);
  return width;
}

/// Takes columns by their importance while they fit.
void fit_columns(Layout& layout, std::size_t left_width) {
  std::set<std::size_t> fitting;
  for (const char* title : by_importance) {
    const auto column = std::ranges::find(layout.columns, title, &TableColumn::title);
    if (column == layout.columns.end()) continue;
    const auto place = static_cast<std::size_t>(column - layout.columns.begin());
    if (layout.widths[place] + 1 > left_width) continue;
    left_width -= layout.widths[place] + 1;
    fitting.insert(place);
  }
  Layout fitted = layout;
  fitted.columns.clear();
  fitted.widths.clear();
  for (std::size_t place = 0; place < layout.columns.size(); ++place)
    if (!fitting.contains(place)) fitted.omitted.push_back(layout.columns[place].title);
  for (const std::size_t place : fitting) {
    fitted.columns.push_back(layout.columns[place]);
    fitted.widths.push_back(layout.widths[place]);
  }
  layout = std::move(fitted);
}

Layout layout_of(const TableRows& rows, const Tables& tables, const TableOptions& options) {
  const bool is_narrow = !options.wide && options.columns.empty();
  Layout layout{.width = options.wide ? wide_width : narrow_width, .columns = rows.columns()};
  std::size_t longest = std::string("policy").size(), heads = std::string("heads").size();
  std::set<std::string> granularities;
  for (const auto& [part, budgets] : tables)
    for (const BudgetRows& budget : budgets)
      for (const PolicyRow& row : budget.rows) {
        longest = std::max(longest, length(row.name()));
        if (row.has_failed()) continue;
        heads = std::max(heads, heads_text(row, *part->traces.front()).size());
        granularities.insert(row.facts->heads);
      }
  // A document has the columns that its author names.
  const bool is_document = options.format == TableFormat::latex || options.format == TableFormat::markdown;
  const bool differ = granularities.size() > 1 && (!is_document || options.columns.empty());
  if (options.wide || differ) layout.heads = heads;
  for (const TableColumn& column : layout.columns) layout.widths.push_back(width_of(rows, column, tables));
  const std::size_t heads_taken = layout.heads == 0 ? 0 : layout.heads + 2;
  if (is_narrow) {
    layout.name = std::min(longest, longest_name);
    fit_columns(layout, layout.width - layout.name - heads_taken);
    return layout;
  }
  std::size_t taken = heads_taken;
  for (const std::size_t width : layout.widths) taken += width + 1;
  if (!options.wide) layout.width = std::clamp(taken + longest, narrow_width, wide_width);
  layout.name = options.wide ? longest : std::min(longest, longest_name);
  return layout;
}

std::vector<std::string> trace_pieces(const TraceRecord& trace) {
  const auto treated = static_cast<int>(trace.treated.size());
  const int without_policy = trace.layers - treated - trace.reading_layers;
  const std::string reading =
      trace.reading_layers == 0 ? "" : fmt::format(" with the queries of {} others", trace.reading_layers);
  const std::string left_out = without_policy == 0 ? "" : fmt::format(" ({} not compressed)", without_policy);
  const std::string first = trace.boundary == trace.prompt ? "" : fmt::format(" (first {} compressed)", trace.boundary);
  std::vector<std::string> pieces{
      trace.name, fmt::format("prompt {}{} + continuation {} tokens", trace.prompt, first, trace.tokens - trace.prompt),
      fmt::format("{} layers{}{}", treated, reading, left_out),
      fmt::format("{}{} query / {} KV heads", trace.has_equal_heads() ? "" : "up to ", trace.query_heads,
                  trace.kv_heads),
      trace.dtype};
  if (trace.synthetic) pieces.emplace_back("synthetic");
  if (trace.is_sampled()) pieces.push_back("ESTIMATE from " + trace.sample_text());
  pieces.emplace_back("OPEN LOOP");
  return pieces;
}

std::string trace_lines(const TraceRecord& trace, const Layout& layout) {
  const std::string interval = "± half width of the 95 % interval of an estimate";
  return wrapped("trace", trace_pieces(trace), "   ", layout.width, 9) +
         (trace.is_sampled() ? wrapped("sample", words_of(interval), " ", layout.width, 9) : "");
}

std::size_t count_prompts(const std::vector<const TraceRecord*>& traces) {
  std::set<std::string> prompts;
  for (const TraceRecord* trace : traces) prompts.insert(prompt_of(*trace));
  return prompts.size();
}

/// Names that differ only in case are those of one model, as on the hub.
struct PrecedesWithoutCase {
  bool operator()(const std::string& a, const std::string& b) const { return boost::ilexicographical_compare(a, b); }
};
using Models = std::set<std::string, PrecedesWithoutCase>;

std::vector<std::string> traces_pieces(const std::vector<const TraceRecord*>& traces) {
  Models models;
  for (const TraceRecord* trace : traces) models.insert(trace->model);
  const std::size_t count = count_prompts(traces);
  std::vector<std::string> pieces{
      fmt::format("{}{} of {}", traces.size(),
                  count == traces.size() ? "" : fmt::format(" ({} prompt{})", count, count == 1 ? "" : "s"),
                  models.size() == 1 ? *models.begin() : fmt::format("{} models", models.size())),
      fmt::format("prompt {} + continuation {} tokens", range_of(traces, &TraceRecord::boundary),
                  range_of(traces, [](const TraceRecord* trace) { return trace->continuation(); })),
      range_of(traces, [](const TraceRecord* trace) { return std::ssize(trace->treated); }) + " layers"};
  if (std::ranges::any_of(traces, &TraceRecord::is_sampled))
    pieces.emplace_back("ESTIMATES from samples of eval queries");
  pieces.emplace_back("OPEN LOOP");
  return pieces;
}

/// What the interval of a mean is.
std::string interval_text(const std::vector<const TraceRecord*>& traces) {
  const std::size_t count = count_prompts(traces);
  if (count == 1) return "no interval, as all traces have one prompt";
  return fmt::format("± half width of its 95 % interval (Student's t, n = {} prompts{})", count,
                     count < few_prompts ? "; few give wide intervals" : "");
}

std::string traces_lines(const std::vector<const TraceRecord*>& traces, const Layout& layout) {
  const std::string interval = interval_text(traces) + "; policies are not paired, kvreplay compare pairs them";
  return wrapped("traces", traces_pieces(traces), "   ", layout.width, 9) +
         wrapped("mean", words_of(interval), " ", layout.width, 9);
}

/// The tokens that the budgets of some rows allow, at most the whole prompt.
struct UsedTokens {
  int least = 0, most = 0;
  bool is_above_all = false, is_above_some = false;  // prompts

  UsedTokens(const std::vector<const TraceRecord*>& traces, const BudgetRows& rows) {
    std::vector<int> used, above;
    const auto add = [&](const TraceRecord& trace, const CellRecord& cell) {
      used.push_back(std::min(cell.budget_tokens, trace.boundary));
      above.push_back(cell.budget_tokens > trace.boundary ? 1 : 0);
    };
    for (const TraceRecord* trace : traces)
      for (const PolicyRow& row : rows.rows) {
        if (row.has_failed() && row.facts->trace == trace->name) add(*trace, *row.facts);
        for (const CellRecord* cell : row.cells)
          if (cell->trace == trace->name) add(*trace, *cell);
      }
    std::tie(least, most) = std::pair(std::ranges::min(used), std::ranges::max(used));
    is_above_all = std::ranges::min(above) > 0;
    is_above_some = std::ranges::max(above) > 0;
  }
};

/// The budget of some rows in tokens, per layer, and over all layers where it is the same for all of them.
std::string budget_lines(const std::vector<const TraceRecord*>& traces, const BudgetRows& rows, const Layout& layout) {
  const Budget budget = Budget::parse(rows.budget);
  const UsedTokens used(traces, rows);
  const TraceRecord& trace = *traces.front();
  const std::string means = budget.bytes > 0       ? budget.literal + " = "
                            : used.is_above_all    ? budget.literal + ", more than the prompt: all "
                            : used.is_above_some   ? budget.literal + ", more than some prompts: "
                            : budget.fraction <= 0 ? ""
                            : traces.size() > 1    ? budget.literal + " of the prompt = "
                                                   : fmt::format("{} of {} = ", budget.literal, trace.boundary);
  const std::string slots = used.least < used.most || traces.size() > 1
                                ? ""
                                : fmt::format(" ({} tokens per head over all layers)",
                                              grouped(static_cast<long>(used.most) * std::ssize(trace.treated)));
  const std::string tokens =
      used.least < used.most ? fmt::format("{} to {}", used.least, used.most) : std::to_string(used.most);
  return wrapped("budget",
                 words_of(fmt::format("{}{} tokens per layer and head on average{}, protected tokens included", means,
                                      tokens, slots)),
                 " ", layout.width, 9);
}

/// "WHAT: A, B"; empty without names.
std::string names_line(const char* what, const std::vector<std::string>& names, const Layout& layout) {
  if (names.empty()) return "";
  std::vector<std::string> pieces = names;
  pieces.front() = fmt::format("{}: {}", what, pieces.front());
  return wrapped("", pieces, ", ", layout.width, 0);
}

/// Whether protected tokens were replaced, those of the policy or of a policy in its parameters.
bool has_replaced_protection(const PolicyRow& row) { return row.facts->params.find("protect=(") != std::string::npos; }

/// Names the policies whose memory is their own, those whose protected tokens were not replaced where those of another
/// policy were, and those that lack some traces.
std::string notes(const TracesRows& part, const BudgetRows& rows, const Layout& layout) {
  std::vector<std::string> own_memory, own_protection, fewer;
  for (const PolicyRow& row : rows.rows) {
    if (row.facts->own_memory && !row.is_control()) own_memory.push_back(row.facts->label);
    if (!has_replaced_protection(row)) own_protection.push_back(row.name());
    if (!row.has_failed() && row.cells.size() < part.traces.size())
      fewer.push_back(fmt::format("{} {}", row.name(), row.cells.size()));
  }
  if (own_protection.size() == rows.rows.size()) own_protection.clear();
  return names_line("not at equal memory, so never marked *", own_memory, layout) +
         names_line("keeps its own protected tokens", own_protection, layout) +
         names_line("fewer traces", fewer, layout);
}

std::string title_line(const Layout& layout) {
  std::string line = left("policy", layout.name) + (layout.heads == 0 ? "" : "  " + left("heads", layout.heads));
  for (std::size_t c = 0; c < layout.columns.size(); ++c)
    line += " " + right(layout.columns[c].title + " ", layout.widths[c]);
  return trimmed(line) + '\n';
}

/// A number with its mark, at its place.
std::string marked(const GridCell& cell, std::size_t width, const Colours& colours) {
  const std::string text = right(cell.text + (cell.is_best ? "*" : " "), width);
  return " " + (cell.is_best ? colours.bold(text) : text);
}

std::string heading_of(const PolicyRow& row) { return row.is_control() ? "controls" : row.facts->family; }

/// The places of rows.
std::vector<std::size_t> in_order(const std::vector<PolicyRow>& rows) {
  std::vector<std::size_t> places(rows.size());
  std::iota(places.begin(), places.end(), std::size_t{0});
  return places;
}

/// The same family by family, in the order of the families' first rows.
std::vector<std::size_t> by_family(const std::vector<PolicyRow>& rows) {
  const auto first = [&](std::size_t place) {
    return std::pair(std::ranges::find(rows, heading_of(rows[place]), heading_of) - rows.begin(), place);
  };
  std::vector<std::size_t> places = in_order(rows);
  std::ranges::sort(places, {}, first);
  return places;
}

std::string grid(const TableRows& all, const TracesRows& part, const BudgetRows& rows, const Layout& layout,
                 const TableOptions& options) {
  const Colours colours{options.colour};
  std::vector<std::vector<GridCell>> columns;
  for (const TableColumn& column : layout.columns) columns.push_back(all.cells(column, rows.rows));
  const bool has_headings = options.all && rows.rows.size() > most_in_one_family;
  std::string lines = title_line(layout), family;
  for (const std::size_t r : has_headings ? by_family(rows.rows) : in_order(rows.rows)) {
    const PolicyRow& row = rows.rows[r];
    if (has_headings && heading_of(row) != std::exchange(family, heading_of(row))) lines += "-- " + family + '\n';
    std::string line = left(cut(row.name(), layout.name), layout.name);
    if (row.has_failed()) {
      lines += trimmed(cut(line + "  failed: " + row.failed->error, layout.width)) + '\n';
      continue;
    }
    if (layout.heads > 0) line += "  " + left(heads_text(row, *part.traces.front()), layout.heads);
    for (std::size_t c = 0; c < columns.size(); ++c) line += marked(columns[c][r], layout.widths[c], colours);
    lines += (row.is_control() ? colours.dim(trimmed(line)) : trimmed(line)) + '\n';
  }
  return lines;
}

bool is_same_policy(const PolicyRow& a, const PolicyRow& b) {
  return std::tie(a.facts->policy, a.facts->params, a.facts->label, a.facts->seed, a.facts->source) ==
         std::tie(b.facts->policy, b.facts->params, b.facts->label, b.facts->seed, b.facts->source);
}

/// Those of every budget, without the controls.
std::vector<PolicyRow> policies_of(const TracesRows& part) {
  std::vector<PolicyRow> policies;
  for (const BudgetRows& budget : part.budgets)
    for (const PolicyRow& row : budget.rows)
      if (!row.is_control() &&
          std::ranges::none_of(policies, [&](const PolicyRow& known) { return is_same_policy(row, known); }))
        policies.push_back(row);
  return policies;
}

/// The headline of a policy at one budget; "-" where it has no cell there.
GridCell headline_cell(const TableRows& all, const BudgetRows& budget, const PolicyRow& policy) {
  const auto row = std::ranges::find_if(budget.rows, [&](const PolicyRow& one) { return is_same_policy(one, policy); });
  if (row == budget.rows.end()) return {.text = "-"};
  GridCell cell = all.cells(all.headline(), budget.rows)[static_cast<std::size_t>(row - budget.rows.begin())];
  if (std::isfinite(cell.value.mean)) cell.text = all.headline().text(cell.value.mean);
  return cell;
}

/// The headline of a few policies at every budget, as many budgets as fit; empty where each has its own table.
std::string budgets_grid(const TableRows& all, const TracesRows& part, std::size_t tables, const Layout& layout,
                         const TableOptions& options) {
  const std::vector<PolicyRow> policies = policies_of(part);
  if (part.budgets.size() == tables || !options.budgets.empty() || policies.size() > most_in_budgets_grid) return "";
  const std::string title = all.headline().title + " at";
  std::size_t name = std::max(layout.name, title.size());
  for (const PolicyRow& row : policies) name = std::max(name, std::min(length(row.name()), longest_name));
  std::vector<std::string> lines{left(title, name)};
  for (const PolicyRow& row : policies) lines.push_back(left(cut(row.name(), name), name));
  std::size_t taken = name;
  for (const BudgetRows& budget : part.budgets) {
    const std::size_t width = std::max<std::size_t>(budget.budget.size() + 1, 7);
    if (taken > name && taken + width + 1 > layout.width) break;
    taken += width + 1;
    lines.front() += " " + right(budget.budget + " ", width);
    for (std::size_t r = 0; r < policies.size(); ++r)
      lines[r + 1] += marked(headline_cell(all, budget, policies[r]), width, Colours{options.colour});
  }
  std::string text;
  for (const std::string& line : lines) text += trimmed(line) + '\n';
  return text + '\n';
}

/// " (5 traces)" where fewer traces than the rows have give a column its values.
std::string fewer_traces(const TableRows& rows, const Tables& tables, const TableColumn& column) {
  int traces = 0, most = 0;
  for (const auto& [part, budgets] : tables)
    for (const BudgetRows& budget : budgets)
      for (const PolicyRow& row : budget.rows) {
        most = std::max(most, rows.value(row, column).count);
        traces = std::max(traces, static_cast<int>(row.cells.size()));
      }
  return most < traces ? fmt::format(" ({} trace{})", most, most == 1 ? "" : "s") : "";
}

/// The metrics of the columns as command lines name them, where the title does not say so. Spans share a metric.
std::string legend(const TableRows& rows, const Tables& tables, const Layout& layout) {
  std::vector<std::string> pieces, spans;
  for (const TableColumn& column : layout.columns) {
    const std::string fewer = fewer_traces(rows, tables, column);
    if (column.metric == fmt::format("span_recall:{}.mean", column.title))
      spans.push_back(column.title + fewer);
    else if (!column.metric.starts_with(column.title) || column.metric.find(':') != std::string::npos)
      pieces.push_back(fmt::format("{} = {}{}", column.title, column.metric, fewer));
    else if (!fewer.empty())
      pieces.push_back(column.title + fewer);
  }
  if (!spans.empty()) spans.back() += " = span_recall:SPAN.mean";
  std::ranges::move(spans, std::back_inserter(pieces));
  const std::string shown = pieces.empty() ? "" : wrapped("columns", pieces, ", ", layout.width, indent);
  if (layout.omitted.empty()) return shown;
  std::vector<std::string> omitted = layout.omitted;
  omitted.front() = "adds " + omitted.front();
  return shown + wrapped("--wide", omitted, ", ", layout.width, indent);
}

/// The policies that a column marks at a budget, "h2o, tova and 2 more"; empty: none.
std::string best_names(const TableRows& rows, const TableColumn& column, const BudgetRows& budget, std::size_t width) {
  constexpr std::size_t most_names = 2;
  const std::vector<GridCell> cells = rows.cells(column, budget.rows);
  std::vector<std::string> names;
  for (std::size_t r = 0; r < cells.size(); ++r)
    if (cells[r].is_best) names.push_back(cut(budget.rows[r].facts->label, width));
  const std::size_t named = std::min(names.size(), most_names);
  return fmt::format("{}{}", fmt::join(std::span(names).first(named), ", "),
                     named == names.size() ? "" : fmt::format(" and {} more", names.size() - named));
}

/// "h2o at 0.1, 0.2; snapkv at 0.3 by out.err"; at a single budget "h2o by out.err: 0.375 (random 0.972, oracle
/// 0.194)". Empty: no policy is the best.
std::string best_text(const TableRows& rows, const TableColumn& column, std::size_t width) {
  const std::vector<BudgetRows>& budgets = rows.parts().front().budgets;
  std::vector<std::pair<std::string, std::string>> best_at;  // by names of policies their budgets
  for (const BudgetRows& budget : budgets) {
    const std::string names = best_names(rows, column, budget, width);
    if (names.empty()) continue;
    const auto known = std::ranges::find(best_at, names, &std::pair<std::string, std::string>::first);
    if (known == best_at.end())
      best_at.emplace_back(names, budget.budget);
    else
      known->second += ", " + budget.budget;
  }
  if (best_at.empty()) return "";
  const auto text = [&](const PolicyRow& row) { return column.text(rows.value(row, column).mean); };
  if (budgets.size() == 1) {
    const std::vector<PolicyRow>& all = budgets.front().rows;
    std::string line = fmt::format("{} by {}: {}", best_at.front().first, column.title, text(*rows.best(column, all)));
    for (const PolicyRow& row : all)
      if (row.is_control() && (row.facts->policy == "random" || row.facts->policy == "oracle") &&
          std::isfinite(rows.value(row, column).mean))
        line += fmt::format(", {} {}", row.name(), text(row));
    return line;
  }
  std::vector<std::string> pieces;
  for (const auto& [policies, at] : best_at) pieces.push_back(fmt::format("{} at {}", policies, at));
  return fmt::format("{} by {}", fmt::join(pieces, "; "), column.title);
}

/// The best policies by the headline, and by each live metric that the table shows.
std::string best_lines(const TableRows& rows, const Layout& layout) {
  if (rows.parts().size() != 1) return "";
  std::string lines;
  const auto add = [&](const TableColumn& column) {
    const std::string text = best_text(rows, column, layout.width - indent);
    if (!text.empty()) lines += wrapped(lines.empty() ? "best" : "", words_of(text), " ", layout.width, indent);
  };
  add(rows.headline());
  for (const TableColumn& column : layout.columns)
    if (column.metric.starts_with(live_prefix)) add(column);
  return lines;
}

/// A figure shows traces of one model.
bool has_several_models(const RunSummary& summary) {
  Models models;
  for (const TraceRecord& trace : summary.traces)
    if (trace.error.empty()) models.insert(trace.model);
  return models.size() > 1;
}

/// Commands that show more of the run.
std::string next_lines(const RunSummary& summary, const TableRows& rows, const Layout& layout, bool is_each,
                       bool omits_rows) {
  if (rows.parts().empty()) return "";
  const std::string folder = shell_word(summary.output.string());
  const std::string show = fmt::format("kvreplay show {}{}", folder, is_each ? " --each" : "");
  const TracesRows& part = rows.parts().front();
  std::vector<std::string> commands;
  if (omits_rows)
    commands.push_back(show + " --all");
  else if (!layout.omitted.empty())
    commands.push_back(show + " --wide");
  if (part.traces.size() > 1 && TableRows::is_compared(part.budgets.front().rows.front()))
    commands.push_back(fmt::format("kvreplay compare {} --baseline {}", folder,
                                   shell_word(part.budgets.front().rows.front().facts->label)));
  else
    commands.push_back(
        fmt::format("kvreplay plot {} {}{}", part.budgets.size() > 1 ? "curve" : "kept", folder,
                    has_several_models(summary) ? " --trace " + shell_word(part.traces.front()->name) : ""));
  commands.push_back(fmt::format("kvreplay report {}", folder));
  std::string text;
  for (const std::string& command : commands) text += left(text.empty() ? "next" : "", indent) + command + '\n';
  return text;
}

/// How many policies a table omits at a budget, which it has, and how many budgets it omits; empty: none.
std::string rest_line(const TableRows& all, const TracesRows& part, const BudgetRows& rows, std::size_t budgets,
                      const Layout& layout) {
  const std::size_t rest = all.rest(*std::ranges::find(part.budgets, rows.budget, &BudgetRows::budget));
  std::vector<std::string> omitted;
  if (rest > 0) omitted.push_back(fmt::format("{} {}", rest, rest == 1 ? "policy" : "policies"));
  if (budgets > 0) omitted.push_back(fmt::format("{} {}", budgets, budgets == 1 ? "budget" : "budgets"));
  if (omitted.empty()) return "";
  std::string line = fmt::format("omitted: {}", fmt::join(omitted, ", "));
  if (rest > 0) {
    const auto policies = std::ranges::count_if(rows.rows, [](const PolicyRow& row) { return !row.is_control(); });
    const auto ranked = std::ranges::count_if(rows.rows, [&](const PolicyRow& row) { return all.is_ranked(row); });
    line += ranked == 0 ? "; these are the first of the run"
                        : fmt::format("; these are the best of equal memory by {}{}", all.headline().title,
                                      ranked < policies ? ", then the first others" : "");
  }
  return wrapped("", words_of(line), " ", layout.width, 0);
}

std::string text_table(const RunSummary& summary, const TableRows& rows, const Tables& tables, const Layout& layout,
                       const TableOptions& options) {
  std::string text;
  double observables = 0;
  for (const TraceRecord& trace : summary.traces) {
    observables += sum(trace.observable_seconds);
    if (!trace.error.empty()) text += fmt::format("trace    {}  failed: {}\n\n", trace.name, trace.error);
  }
  bool omits_rows = false;
  for (const auto& [part, budgets] : tables) {
    text += part->traces.size() > 1 ? traces_lines(part->traces, layout) : trace_lines(*part->traces.front(), layout);
    const std::string of_budgets = budgets_grid(rows, *part, budgets.size(), layout, options);
    for (const BudgetRows& budget : budgets) {
      const std::size_t more_budgets = of_budgets.empty() ? part->budgets.size() - budgets.size() : 0;
      const std::string rest = rest_line(rows, *part, budget, more_budgets, layout);
      omits_rows = omits_rows || !rest.empty();
      text += budget_lines(part->traces, budget, layout) + grid(rows, *part, budget, layout, options) + rest +
              notes(*part, budget, layout) + '\n';
    }
    text += of_budgets;
    omits_rows = omits_rows || (budgets.size() < part->budgets.size());
  }
  if (std::ranges::find(layout.columns, "skill", &TableColumn::title) != layout.columns.end())
    text += wrapped("",
                    words_of("skill = (recall - random twin) / (oracle - random twin), at the same token counts: 0 = "
                             "random, 1 = best"),
                    " ", layout.width, 0);
  if (std::ranges::any_of(layout.columns, [](const TableColumn& c) { return c.title.starts_with(live_prefix); }))
    text += wrapped("", words_of("live.* = measured in the live model that decodes with these kept sets (closed loop)"),
                    " ", layout.width, 0);
  text += legend(rows, tables, layout) + best_lines(rows, layout);
  if (!summary.self_check.empty()) text += fmt::format("self-check {}\n", fmt::join(summary.self_check, " | "));
  std::string folder = summary.output.empty() ? "" : summary.output.string() + "   ";
  const auto reused = std::ranges::count(summary.cells, CellState::skipped, &CellRecord::state);
  text += fmt::format("{}{}shared observables {}{}\n", left("results", indent), folder, short_duration(observables),
                      reused == 0 ? "" : fmt::format("   {} of {} cells reused", reused, summary.cells.size()));
  return text + (summary.output.empty() ? "" : next_lines(summary, rows, layout, options.each, omits_rows));
}

/// A document's table, with the budget where there is one, and the notes: comments in LaTeX, paragraphs in Markdown.
std::string document(const TableRows& rows, const Tables& tables, Layout layout, TableFormat format) {
  layout.width = std::numeric_limits<std::size_t>::max();
  std::string below, of_budgets;
  for (const auto& [part, budgets] : tables) {
    if (part->traces.size() > 1)
      below += fmt::format("traces {}\nmean {}\n", fmt::join(traces_pieces(part->traces), ", "),
                           interval_text(part->traces));
    else
      below += fmt::format("trace {}\n", fmt::join(trace_pieces(*part->traces.front()), ", "));
    if (budgets.size() == 1)
      below += (tables.size() == 1 ? "" : part->traces.front()->name + ": ") +
               budget_lines(part->traces, budgets.front(), layout);
    for (const BudgetRows& budget : budgets)
      below += rest_line(rows, *part, budget, 0, layout) + notes(*part, budget, layout);
    if (budgets.size() < part->budgets.size())
      of_budgets = fmt::format("{} of {} budgets; --all prints all\n", budgets.size(), part->budgets.size());
  }
  below += of_budgets;
  if (!layout.omitted.empty()) below += fmt::format("--wide adds {}\n", fmt::join(layout.omitted, ", "));
  std::vector<std::string> lines;
  boost::replace_all(below, "budget   ", "budget ");
  boost::replace_all(below, "never marked *", "never marked as the best");
  boost::split(lines, below, boost::is_any_of("\n"));
  std::string before, after;
  std::set<std::string> known{""};
  for (const std::string& line : lines) {
    if (!known.insert(line).second) continue;
    before += "% " + line + '\n';
    after += '\n' + line + '\n';
  }
  const std::string text = formatted_table(rows, layout.columns, layout.heads > 0, format);
  return format == TableFormat::latex ? before + text : text + after;
}

}  // namespace

std::string table(const RunSummary& summary, const TableOptions& options) {
  const RunSummary part = selection(summary, options);
  const TableRows rows(part, options);
  if (options.format == TableFormat::csv) return formatted_table(rows, rows.columns(), true, options.format);
  const Tables tables = tables_of(rows);
  const Layout layout = layout_of(rows, tables, options);
  if (options.format != TableFormat::text) return document(rows, tables, layout, options.format);
  return text_table(part, rows, tables, layout, options);
}

}  // namespace kvreplay
