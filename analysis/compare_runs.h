// Where two runs differ, value by value and set by set: the answer to "are these the same results?".
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "analysis/trace_cells.h"

namespace kvreplay {

struct RunDifference {
  std::string where;                         // "demo snapkv window=8,... 0.1: attention_recall, layer 3, head all"
  std::optional<std::string> first, second;  // none: that side lacks it
};

/// Each is a run's folder or a file of its cells, both of the same kind. The backend, the version of the numerics and
/// the cells' ids are not compared. Throws Error{input} for another file or folder, and for a damaged file.
std::vector<RunDifference> compare_runs(const std::filesystem::path& first, const std::filesystem::path& second,
                                        double tolerance = 0.0);

/// Adds the numbers that differ by more than `tolerance`, and the metrics that one side lacks.
void compare_values(const std::string& where, const TraceRecord& trace, const ValuesByMetric& first,
                    const ValuesByMetric& second, double tolerance, std::vector<RunDifference>& differences);

/// Whether `path` is a folder of results or a file of cells. Throws Error{input} for results of format 1.
bool is_run(const std::filesystem::path& path);

}  // namespace kvreplay
