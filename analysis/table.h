// The table that a run prints: one row a policy, grouped by budget.
#pragma once

#include <string>

#include "analysis/run.h"

namespace kvreplay {

/// At most 140 columns wide. Controls are in parentheses, random twins that joined as controls are left out. `*` marks
/// the best of what was asked for in each column and budget, among policies that beat their twins. Ends with a newline.
std::string table(const RunSummary& summary);

}  // namespace kvreplay
