// Two runs, row by row and set by set: the answer to "are these the same results?".
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace kvreplay {

struct RunDifference {
  std::vector<std::string> only_first;  // rows, cells or datasets that the other side lacks
  std::vector<std::string> only_second;
  struct Value {
    std::string where;  // "demo snapkv window=8,... 0.1: attention_recall, layer 3, head all"
    std::string first;
    std::string second;
  };
  std::vector<Value> values;  // numbers and words of results.csv, numbers of datasets that differ beyond the tolerance
  std::vector<Value> sets;    // kept positions: where, and what each side keeps that the other does not

  bool equal() const { return only_first.empty() && only_second.empty() && values.empty() && sets.empty(); }
};

/// Each is a run's folder or a selections file, both of the same kind. Which backend computed a row and the cell's id
/// are not compared. Throws Error{input} for what is neither.
RunDifference compare_runs(const std::filesystem::path& first, const std::filesystem::path& second,
                           double tolerance = 0.0);

/// Whether `path` is a folder of results or a selections file.
bool is_run(const std::filesystem::path& path);

}  // namespace kvreplay
