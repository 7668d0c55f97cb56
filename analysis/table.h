// The table that a run prints: one row a policy, of one trace or with means over several.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "analysis/run.h"

namespace kvreplay {

enum class TableFormat { text, markdown, latex, csv };

/// The part of a run that a table shows. Empty lists: the default part.
struct TableOptions {
  std::vector<std::string> policies = {};  // names, labels or NAME:KEY=VALUE; default: at most ten, and the controls
  std::vector<std::string> budgets = {};   // in any spelling, or in tokens; default: one, as docs/results.md says
  std::vector<std::string> traces = {};    // default: all
  std::vector<std::string> columns = {};   // metrics, their titles, or skill; default: those that fit 80 columns
  bool all = false;                        // every policy at every budget
  bool each = false;                       // each trace by itself, in place of means over the traces
  bool wide = false;                       // every column of the wide table
  bool colour = false;                     // of text: bold for the best, dim for controls
  TableFormat format = TableFormat::text;
};

/// The traces and cells that `options` names, of all columns. Throws Error{usage} for a name that the run does not
/// have, with the nearest.
RunSummary selection(RunSummary summary, const TableOptions& options);

/// Throws Error{usage} for a column that does not exist, or that a run of these metrics does not measure, with random
/// twins (`has_twins`) or without.
void check_columns(const std::vector<std::string>& columns, std::span<const MetricName> metrics, bool has_twins);

/// Controls are in parentheses; random twins that are controls are left out. `*` marks the best policy of the
/// selection in each column and budget, among policies that beat their twins. Text ends with the best policies, the
/// self-check and further commands; without `output`, with the former two. Ends with a newline. Throws as selection(),
/// and Error{usage} for a column that was not measured.
std::string table(const RunSummary& summary, const TableOptions& options = {});

}  // namespace kvreplay
