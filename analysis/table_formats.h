// A table as one list of rows in a format of other programs.
#pragma once

#include <string>

#include "analysis/table_rows.h"

namespace kvreplay {

/// Markdown, LaTeX (booktabs) or CSV with a column for the trace and the budget where there are several. CSV has full
/// precision, times in seconds and sizes in bytes, and the half widths of intervals in columns of their own.
std::string formatted_table(const TableRows& rows, const std::vector<TableColumn>& columns, bool has_heads,
                            TableFormat format);

}  // namespace kvreplay
