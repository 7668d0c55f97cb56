// The rows and columns of a table, chosen from a run.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "analysis/mean_interval.h"
#include "analysis/metrics/metric.h"
#include "analysis/table.h"
#include "analysis/trace_cells.h"

namespace kvreplay {

/// A policy at a budget: its cell of one trace, or its cells of several.
struct PolicyRow {
  const CellRecord* facts = nullptr;          // of the first trace
  std::vector<const CellRecord*> cells = {};  // that have not failed
  const CellRecord* failed = nullptr;         // the first that has

  bool is_control() const { return facts->role == "control"; }
  bool has_failed() const { return cells.empty(); }
  /// The label, of controls in parentheses.
  std::string name() const { return is_control() ? "(" + facts->label + ")" : facts->label; }
};

struct TableColumn {
  std::string title = {};
  std::string metric = {};  // its name on command lines
  Better better = Better::neither;
  bool has_interval = false;  // in a table of means
  std::size_t least_width = 0;
  std::function<double(const CellRecord&)> value = {};
  std::function<double(const CellRecord&)> half_width = {};  // of the value of one sampled trace; empty: it has none
  std::function<std::string(double)> text = {};
};

struct BudgetRows {
  std::string budget = {};
  std::vector<PolicyRow> rows = {};
};

/// One trace, or all traces of a table of means.
struct TracesRows {
  std::vector<const TraceRecord*> traces = {};
  std::vector<BudgetRows> budgets = {};
};

struct GridCell {
  MeanInterval value = {};
  std::string text = {};
  bool is_best = false;
};

/// Rows, columns and marks of a summary. It refers to the summary.
class TableRows {
 public:
  /// Throws Error{usage} for a column that was not measured.
  TableRows(const RunSummary& summary, const TableOptions& options);

  /// Everything that the options name.
  std::span<const TracesRows> parts() const { return parts_; }
  /// The budgets of a part that are tables of their own, with the rows of these tables.
  std::vector<BudgetRows> tables(const TracesRows& part) const;
  /// The number of policies of a budget that its table leaves out.
  std::size_t rest(const BudgetRows& all) const;

  /// Those of the options, or every measured column.
  const std::vector<TableColumn>& columns() const { return columns_; }
  /// By which policies are ranked: the pooled output error, or the attention recall where that was not measured.
  const TableColumn& headline() const { return headline_; }
  /// Policies at their own memory are not, and those without the headline.
  bool is_ranked(const PolicyRow& row) const;

  /// Over several traces their mean; of one trace its value, with an interval where it is an estimate.
  MeanInterval value(const PolicyRow& row, const TableColumn& column) const;
  /// Of one column, in the order of `rows`.
  std::vector<GridCell> cells(const TableColumn& column, std::span<const PolicyRow> rows) const;
  /// Of two or more compared policies the best; null: there is none.
  const PolicyRow* best(const TableColumn& column, std::span<const PolicyRow> rows) const;
  /// Only equal memory is compared.
  static bool is_compared(const PolicyRow& row);

 private:
  bool shows_all() const;
  bool may_be_best(const PolicyRow& row) const;
  TableColumn column_of(const std::string& text) const;
  std::vector<TableColumn> measured_columns() const;
  std::set<MetricName> variants_in_place_of_titles() const;
  std::set<MetricName> live_names_with_ways() const;
  bool is_measured(const TableColumn& column) const;
  bool bytes_differ() const;
  BudgetRows shortened(const BudgetRows& all) const;

  const TableOptions& options_;
  std::map<std::string, double> skills_;
  std::map<std::string, std::string> prompts_;  // by trace
  std::set<MetricName> live_names_;
  std::vector<TracesRows> parts_;
  TableColumn headline_;
  std::vector<TableColumn> columns_;
};

/// "999.9 ms".
std::string short_duration(double seconds);

/// What traces of one prompt share: the hash of its token ids, or the name of the trace.
std::string prompt_of(const TraceRecord& trace);

/// The granularity; sets of query heads hold as many times the memory as there are query heads to a KV head.
std::string heads_text(const PolicyRow& row, const TraceRecord& trace);

}  // namespace kvreplay
