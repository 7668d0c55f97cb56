#include "analysis/table_formats.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/algorithm/string/replace.hpp>
#include <cmath>
#include <string_view>

#include "analysis/csv.h"

namespace kvreplay {
namespace {

/// A line of a list: texts that name the row, and its numbers.
struct Line {
  bool begins_table = false;  // the first of its trace and budget
  std::vector<std::string> names;
  std::vector<GridCell> cells;
  std::string error;
};

struct Lines {
  std::vector<std::string> titles = {};  // of the names
  std::vector<TableColumn> columns = {};
  std::vector<Line> lines = {};
};

/// CSV has the same names in every table, and plain labels: parentheses are for readers.
Lines lines_of(const TableRows& rows, const std::vector<TableColumn>& columns, bool has_heads, bool is_csv) {
  Lines all{.columns = columns};
  const bool several_traces = rows.parts().size() > 1;
  bool several_budgets = is_csv;
  for (const TracesRows& part : rows.parts()) several_budgets = several_budgets || rows.tables(part).size() > 1;
  if (several_traces) all.titles.emplace_back("trace");
  if (several_budgets) all.titles.emplace_back("budget");
  all.titles.emplace_back("policy");
  if (has_heads) all.titles.emplace_back("heads");
  for (const TracesRows& part : rows.parts())
    for (const BudgetRows& budget : rows.tables(part)) {
      std::vector<std::vector<GridCell>> cells;
      for (const TableColumn& column : columns) cells.push_back(rows.cells(column, budget.rows));
      for (std::size_t r = 0; r < budget.rows.size(); ++r) {
        Line& line = all.lines.emplace_back();
        line.begins_table = r == 0;
        const PolicyRow& row = budget.rows[r];
        if (several_traces) line.names.push_back(part.traces.front()->name);
        if (several_budgets) line.names.push_back(budget.budget);
        line.names.push_back(is_csv ? row.facts->label : row.name());
        if (has_heads) line.names.push_back(heads_text(row, *part.traces.front()));
        for (const std::vector<GridCell>& column : cells) line.cells.push_back(column[r]);
        if (row.failed != nullptr) line.error = row.failed->error;
      }
    }
  return all;
}

std::string markdown(const Lines& all) {
  std::string text = fmt::format("| {} |", fmt::join(all.titles, " | ")), rule = "\n|";
  for (const TableColumn& column : all.columns) text += fmt::format(" {} |", column.title);
  for (std::size_t i = 0; i < all.titles.size(); ++i) rule += " --- |";
  for (std::size_t i = 0; i < all.columns.size(); ++i) rule += " ---: |";
  text += rule + "\n";
  for (const Line& line : all.lines) {
    text += "|";
    for (const std::string& name : line.names) text += fmt::format(" {} |", boost::replace_all_copy(name, "|", "\\|"));
    for (const GridCell& cell : line.cells) text += (cell.is_best ? " **" + cell.text + "**" : " " + cell.text) + " |";
    text += "\n";
  }
  return text;
}

std::string latex_text(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '\\' || c == '~' || c == '^') {
      escaped += c == '\\' ? "\\textbackslash{}" : c == '~' ? "\\textasciitilde{}" : "\\textasciicircum{}";
      continue;
    }
    if (std::string_view("_%&#${}").find(c) != std::string_view::npos) escaped += '\\';
    escaped += c;
  }
  return boost::replace_all_copy(escaped, "±", "$\\pm$");
}

/// With the package booktabs, and a rule between budgets.
std::string latex(const Lines& all) {
  std::string text = fmt::format("\\begin{{tabular}}{{{}{}}}\n\\toprule\n", std::string(all.titles.size(), 'l'),
                                 std::string(all.columns.size(), 'r'));
  std::vector<std::string> entries = all.titles;
  for (const TableColumn& column : all.columns) entries.push_back(latex_text(column.title));
  text += fmt::format("{} \\\\\n", fmt::join(entries, " & "));
  for (const Line& line : all.lines) {
    if (line.begins_table) text += "\\midrule\n";
    entries.clear();
    for (const std::string& name : line.names) entries.push_back(latex_text(name));
    for (const GridCell& cell : line.cells) {
      const std::string value = latex_text(cell.text);
      entries.push_back(cell.is_best ? "\\textbf{" + value + "}" : value);
    }
    text += fmt::format("{} \\\\\n", fmt::join(entries, " & "));
  }
  return text + "\\bottomrule\n\\end{tabular}\n";
}

std::string csv(const Lines& all) {
  std::vector<bool> has_interval;
  for (std::size_t c = 0; c < all.columns.size(); ++c)
    has_interval.push_back(std::ranges::any_of(
        all.lines, [&](const Line& line) { return std::isfinite(line.cells[c].value.half_width); }));
  std::vector<std::string> fields = all.titles;
  for (std::size_t c = 0; c < all.columns.size(); ++c) {
    fields.push_back(all.columns[c].metric);
    if (has_interval[c]) fields.push_back(all.columns[c].metric + " half width");
  }
  fields.emplace_back("error");
  std::string text = csv_line(fields);
  for (const Line& line : all.lines) {
    fields = line.names;
    for (std::size_t c = 0; c < all.columns.size(); ++c) {
      fields.push_back(csv_number(line.cells[c].value.mean));
      if (has_interval[c]) fields.push_back(csv_number(line.cells[c].value.half_width));
    }
    fields.push_back(line.error);
    text += csv_line(fields);
  }
  return text;
}

}  // namespace

std::string formatted_table(const TableRows& rows, const std::vector<TableColumn>& columns, bool has_heads,
                            TableFormat format) {
  const Lines all = lines_of(rows, columns, has_heads, format == TableFormat::csv);
  return format == TableFormat::markdown ? markdown(all) : format == TableFormat::latex ? latex(all) : csv(all);
}

}  // namespace kvreplay
