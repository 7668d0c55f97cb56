// The results of a run on stdout: for `kvreplay replay` and `kvreplay show`.
#pragma once

#include "analysis/run.h"
#include "analysis/table.h"
#include "arguments.h"

namespace kvreplay {

/// Columns, rows and format by the options of replay and show. Throws Error{usage} for two formats.
TableOptions table_options_of(const Arguments& arguments);

/// The same, and the policies, budgets and traces by the options of show.
TableOptions show_options_of(const Arguments& arguments);

/// A table as `options` describe it, or JSON with --json.
void print_run(const Arguments& arguments, const TableOptions& options, const RunSummary& summary);

}  // namespace kvreplay
