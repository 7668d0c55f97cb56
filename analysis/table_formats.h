// A table as one list of rows in a format of other programs.
#pragma once

#include <string>

#include "analysis/table_rows.h"

namespace kvreplay {

/// Markdown, LaTeX (booktabs) or CSV, with columns for the trace and the budget where there are several. CSV always has
/// the budget, full precision, times in seconds and sizes in bytes, columns for the half widths of intervals, and the
/// reason of a failure.
std::string formatted_table(const TableRows& rows, const std::vector<TableColumn>& columns, bool has_heads,
                            TableFormat format);

}  // namespace kvreplay
