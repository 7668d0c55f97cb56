#include "analysis/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <optional>

#include "analysis/skill.h"
#include "policies/twin.h"

namespace kvreplay {
namespace {

constexpr std::size_t widest = 150;
constexpr std::size_t many = 12;  // more rows than these are read family by family
// "999.9 ms" and a mark: what a table looks like must not depend on how long it took.
constexpr std::size_t longest_duration = 9;

/// Of cells with a random twin, by their ids.
using Skills = std::map<std::string, double>;

struct Column {
  std::string title;
  std::function<double(const CellRecord&)> value;
  std::function<std::string(double)> text;
  Better better;
  std::size_t least_width = 0;
};

std::string three_digits(double value) { return fmt::format("{:.3f}", value); }
std::string one_digit(double value) { return fmt::format("{:.1f}", value); }

std::string duration(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.1f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

Column metric_column(const char* title, MetricName name) {
  const Better better = better_of(name);
  return {title, [name = std::move(name)](const CellRecord& cell) { return cell.value(name); }, three_digits, better};
}

/// Whether bytes say more than kept tokens do: not where a kept token takes as many in every cell.
bool bytes_differ(const std::vector<CellRecord>& cells) {
  double least = std::numeric_limits<double>::infinity(), most = 0;
  for (const CellRecord& cell : cells) {
    const double of_token = cell.value({"kv_bytes", ""}) / cell.kept_tokens;
    if (!std::isfinite(of_token)) continue;
    least = std::min(least, of_token);
    most = std::max(most, of_token);
  }
  return most > least * (1 + 1e-9);
}

double skill_of(const CellRecord& cell, const Skills& skills) {
  const auto found = skills.find(cell.id);
  return found == skills.end() ? std::numeric_limits<double>::quiet_NaN() : found->second;
}

/// The pooled error, which orders policies more like a live model (docs/closed-loop.md); in runs without it, the mean
/// over heads, under another title.
Column output_error(const std::vector<CellRecord>& cells) {
  const MetricName pooled{"output_error", "pooled"};
  const bool has_pooled =
      std::ranges::any_of(cells, [&](const CellRecord& cell) { return std::isfinite(cell.value(pooled)); });
  return has_pooled ? metric_column("out.err", pooled) : metric_column("head.err", {"output_error", ""});
}

/// The columns that some cell has a value for; that of skill where some cell has a random twin.
std::vector<Column> columns_of(const std::vector<CellRecord>& cells, const Skills& skills) {
  const bool has_twins = std::ranges::any_of(cells, [&](const CellRecord& cell) { return skills.contains(cell.id); });
  std::vector<Column> all{
      {"kept", [](const CellRecord& cell) { return cell.kept_tokens; }, one_digit, Better::neither},
      {"held", [](const CellRecord& cell) { return cell.value({"held_tokens", ""}); }, one_digit, Better::neither},
      {"KiB", [](const CellRecord& cell) { return cell.value({"kv_bytes", ""}) / 1024; }, one_digit, Better::neither},
      metric_column("recall", {"attention_recall", ""}),
      {"skill", [&skills](const CellRecord& cell) { return skill_of(cell, skills); }, three_digits, Better::higher},
      metric_column("att.cos", {"attention_cosine", ""}),
      metric_column("att.l1", {"attention_l1", ""}),
      metric_column("out.cos", {"output_cosine", ""}),
      output_error(cells),
      metric_column("kv.l1", {"kv_l1_loss", ""}),
      metric_column("jaccard", {"jaccard_adjacent", "mean"}),
      metric_column("needle", {"span_recall", "needle.mean"}),
      metric_column("answer", {"span_recall", "answer.mean"}),
      metric_column("question", {"span_recall", "question.mean"}),
  };
  std::erase_if(all, [&](const Column& column) {
    if (column.title == "KiB" && !bytes_differ(cells)) return true;
    if (column.title == "skill") return !has_twins;
    return std::ranges::all_of(cells, [&](const CellRecord& cell) { return !std::isfinite(column.value(cell)); });
  });
  all.push_back({"select", [](const CellRecord& cell) { return cell.select_seconds(); }, duration,
                 better_of(MetricName{"select_seconds", ""}), longest_duration});
  return all;
}

std::string grouped(long number) {
  std::string digits = std::to_string(number);
  for (std::size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, " ");
  return digits;
}

/// Characters, not bytes; names are ASCII, but a user's parameter may hold anything.
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

std::string shown_name(const CellRecord& cell) { return cell.role == "control" ? "(" + cell.label + ")" : cell.label; }

/// Sets of query heads hold as many times the memory as there are query heads to a KV head.
std::string shown_heads(const CellRecord& cell, const TraceRecord& trace) {
  return cell.heads == "query" ? fmt::format("query {}x", trace.query_heads / std::max(1, trace.kv_heads)) : cell.heads;
}

/// Only equal memory is compared.
bool is_compared(const CellRecord& cell) {
  return cell.role != "control" && cell.state != CellState::failed && !cell.own_memory;
}

/// A policy that does not beat its random twin is never marked.
bool may_be_best(const CellRecord& cell, const Skills& skills) {
  return is_compared(cell) && !(skill_of(cell, skills) <= 0);
}

std::optional<double> best_of(const Column& column, const std::vector<const CellRecord*>& cells, const Skills& skills) {
  std::optional<double> best;
  int compared = 0;
  for (const CellRecord* cell : cells) {
    const double value = column.value(*cell);
    if (!is_compared(*cell) || !std::isfinite(value)) continue;
    ++compared;
    if (!may_be_best(*cell, skills)) continue;
    if (!best || (column.better == Better::higher ? value > *best : value < *best)) best = value;
  }
  return column.better == Better::neither || compared < 2 ? std::nullopt : best;
}

std::string trace_line(const TraceRecord& trace) {
  const auto treated = static_cast<int>(trace.treated.size());
  const std::string left_out =
      trace.layers == treated ? "" : fmt::format(" ({} not compressed)", trace.layers - treated);
  const std::string first = trace.boundary == trace.prompt ? "" : fmt::format(" (first {} compressed)", trace.boundary);
  const std::string tokens =
      fmt::format("prompt {}{} + continuation {}", trace.prompt, first, trace.tokens - trace.prompt);
  return fmt::format("trace    {}  {} tokens   {} layers{}   {} query / {} KV heads   {}{}        OPEN LOOP\n",
                     trace.name, tokens, treated, left_out, trace.query_heads, trace.kv_heads, trace.dtype,
                     trace.synthetic ? "   synthetic" : "");
}

/// What the budget of some cells means in tokens, and in slots where it is the same for all of them.
std::string budget_line(const TraceRecord& trace, const std::vector<const CellRecord*>& cells) {
  const Budget budget = Budget::parse(cells.front()->budget);
  const auto [least, most] = std::ranges::minmax(cells, {}, &CellRecord::budget_tokens);
  const int tokens = most->budget_tokens;
  const std::string means = budget.bytes > 0      ? budget.literal + " = "
                            : budget.fraction > 0 ? fmt::format("{} of {} = ", budget.literal, trace.boundary)
                                                  : "";
  if (least->budget_tokens < tokens)
    return fmt::format("budget   {}{} to {} tokens per layer and head on average, protected tokens included\n", means,
                       least->budget_tokens, tokens);
  return fmt::format(
      "budget   {}{} tokens per layer and head on average ({} over all layers), protected tokens included\n", means,
      tokens, grouped(static_cast<long>(tokens) * std::ssize(trace.treated)));
}

/// Names those whose memory is their own.
std::string own_memory_line(const std::vector<const CellRecord*>& cells) {
  std::string names;
  for (const CellRecord* cell : cells)
    if (cell->own_memory && cell->role != "control") names += (names.empty() ? "" : ", ") + cell->label;
  return names.empty() ? "" : cut("not at equal memory, so never marked *: " + names, widest) + '\n';
}

/// Whether protected tokens were replaced, those of the policy or of a policy in its parameters.
bool has_replaced_protection(const CellRecord& cell) { return cell.params.find("protect=(") != std::string::npos; }

/// Names the policies whose protected tokens were not replaced, where those of another policy were.
std::string own_protection_line(const std::vector<const CellRecord*>& cells) {
  std::string names;
  for (const CellRecord* cell : cells)
    if (!has_replaced_protection(*cell)) names += (names.empty() ? "" : ", ") + shown_name(*cell);
  if (names.empty() || std::ranges::none_of(cells, [](const auto* cell) { return has_replaced_protection(*cell); }))
    return "";
  return cut("keeps its own protected tokens: " + names, widest) + '\n';
}

std::string rows(const TraceRecord& trace, const std::vector<const CellRecord*>& cells,
                 const std::vector<Column>& columns, const Skills& skills) {
  std::vector<std::vector<std::string>> texts;
  std::vector<std::size_t> widths;
  for (const Column& column : columns) {
    const std::optional<double> best = best_of(column, cells, skills);
    std::vector<std::string> text;
    for (const CellRecord* cell : cells) {
      const double value = column.value(*cell);
      const bool is_best = best && may_be_best(*cell, skills) && value == *best;
      text.push_back((std::isfinite(value) ? column.text(value) : std::string("-")) + (is_best ? "*" : " "));
    }
    std::size_t width = std::max(column.title.size() + 1, column.least_width);
    for (const std::string& one : text) width = std::max(width, one.size());
    widths.push_back(width);
    texts.push_back(std::move(text));
  }
  std::size_t taken = 2 + std::string("query 16x").size(), name_width = std::string("policy").size();
  for (const std::size_t width : widths) taken += width + 1;
  for (const CellRecord* cell : cells) name_width = std::max(name_width, length(shown_name(*cell)));
  name_width = std::min(name_width, widest - std::min(taken, widest - 12));

  std::string lines = left("policy", name_width) + "  " + left("heads", 9);
  for (std::size_t c = 0; c < columns.size(); ++c) lines += " " + right(columns[c].title + " ", widths[c]);
  lines.erase(lines.find_last_not_of(' ') + 1);
  lines += '\n';
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const bool begins = i == 0 || cells[i]->family != cells[i - 1]->family || cells[i]->role != cells[i - 1]->role;
    if (cells.size() > many && begins) lines += "-- " + cells[i]->family + '\n';
    std::string line = left(cut(shown_name(*cells[i]), name_width), name_width) + "  ";
    if (cells[i]->state == CellState::failed) {
      line = cut(line + "failed: " + cells[i]->error, widest);
    } else {
      line += left(shown_heads(*cells[i], trace), 9);
      for (std::size_t c = 0; c < columns.size(); ++c) line += " " + right(texts[c][i], widths[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    lines += line + '\n';
  }
  return lines;
}

}  // namespace

std::string table(const RunSummary& summary) {
  const Skills skills = kvreplay::skills(summary.cells);
  const auto is_shown = [](const CellRecord& cell) {
    return cell.role != "control" || cell.policy != random_twin_name;
  };
  std::string text;
  double observables = 0;
  for (const TraceRecord& trace : summary.traces) {
    if (!trace.error.empty()) {
      text += fmt::format("trace    {}  failed: {}\n\n", trace.name, trace.error);
      continue;
    }
    observables += sum(trace.observable_seconds);
    text += trace_line(trace);
    std::vector<CellRecord> of_trace;
    std::ranges::copy_if(summary.cells, std::back_inserter(of_trace),
                         [&](const CellRecord& cell) { return cell.trace == trace.name && is_shown(cell); });
    const std::vector<Column> columns = columns_of(of_trace, skills);
    for (std::size_t first = 0; first < of_trace.size();) {
      std::vector<const CellRecord*> group;
      while (first + group.size() < of_trace.size() && of_trace[first + group.size()].budget == of_trace[first].budget)
        group.push_back(&of_trace[first + group.size()]);
      text += budget_line(trace, group) + rows(trace, group, columns, skills) + own_memory_line(group) +
              own_protection_line(group) + '\n';
      first += group.size();
    }
  }
  if (!skills.empty())
    text +=
        "skill = (recall - random twin) / (oracle - random twin), at the same token counts: 0 = random, 1 = best\n\n";
  text += "self-check";
  for (std::size_t i = 0; i < summary.self_check.size(); ++i) text += (i == 0 ? " " : " | ") + summary.self_check[i];
  return text + fmt::format("     shared observables {}     {}\n", duration(observables), summary.output.string());
}

}  // namespace kvreplay
