// The results of a run on stdout: of `kvreplay replay`, and again of `kvreplay show`.
#pragma once

#include "analysis/run.h"
#include "analysis/table.h"
#include "arguments.h"

namespace kvreplay {

/// What the options of replay and show say of the table. Throws Error{usage} for two formats.
TableOptions table_options_of(const Arguments& arguments);

/// A table as these options describe it, or JSON with --json.
void print_run(const Arguments& arguments, const RunSummary& summary);

}  // namespace kvreplay
