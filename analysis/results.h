// The tables of a run, views of its cells/: results.csv and seconds.csv. No time and no date is in results.csv: equal
// runs have equal ones.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "analysis/replaced_file.h"
#include "analysis/trace_cells.h"

namespace kvreplay {

/// How much of the values results.csv shows: the means over all layers; each layer too; each head too.
enum class Detail { summary, layer, head };

/// "summary", "layer" or "head"; throws Error{usage}.
Detail parse_detail(std::string_view text);

/// And back.
const char* word(Detail detail);

/// The columns of results.csv, in their order; where a trace is sampled, `sample` and `half_width` follow.
std::span<const std::string> result_columns();

/// The files of a folder while they are assembled, in the order of the traces' names. Those that were there are
/// replaced in the end, or stay where this ends before. Throws Error{resources} when the disk is full.
class Results {
 public:
  /// `sampled`: some trace that will be added is.
  Results(const std::filesystem::path& output, Detail detail, bool sampled);
  void add(const TraceCells& all);
  /// All of it is on the disk; nothing is added any more.
  void complete();
  /// The complete files replace those that were there.
  void finish();

 private:
  Detail detail_;
  bool sampled_;
  ReplacedFile rows_, seconds_;
};

/// The same rows in memory, one number each: `owners` have the fields of results.csv that all rows of a cell, or of a
/// trace, share, those from trace to n_queries and those from open_loop to cell, then the sample.
struct ResultColumns {
  std::vector<std::vector<std::string>> owners;
  std::vector<MetricName> metrics;
  std::vector<std::int32_t> owner, layer, head, metric;  // of each row; -1: all layers, all heads
  std::vector<double> value, half_width;                 // NaN: undefined, and not an estimate

  /// Traces in the order of their names.
  void add(const TraceRecord& trace, std::span<const CellRecord> cells, Detail detail);
};

/// From output/cells/*.h5.
void assemble(const std::filesystem::path& output, Detail detail);

}  // namespace kvreplay
