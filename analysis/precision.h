// How large a sample must be: samples grow until their estimates are precise enough, or order the policies.
#pragma once

#include <span>
#include <string_view>

#include "analysis/metrics/metric.h"
#include "analysis/trace_cells.h"

namespace kvreplay {

/// Samples of one trace, each independent of those before it. An interval of each misses the exact value with
/// probability 0.05 / most_looks, so the last one misses it with at most 0.05, wherever the sequence ends (Bonferroni).
inline constexpr int most_looks = 3;
/// Eval queries of the first sample.
inline constexpr int pilot_queries = 64;

struct Precision {
  double half_width = 0;  // of each policy's interval; 0: none is required
  MetricName metric{"attention_recall", ""};

  /// "0.005", or with a metric "0.02:output_error:pooled". Throws Error{usage}.
  static Precision parse(std::string_view text);
  std::string text() const;

  /// Whether the intervals of all cells are as narrow, or their order is settled.
  bool suffices(std::span<const CellRecord* const> cells, const TraceRecord& trace) const;
  /// Whether the intervals of all cells are as narrow.
  bool is_reached(std::span<const CellRecord* const> cells, const TraceRecord& trace) const;
  /// Whether, at each budget, two or more cells differ from one another by more than the half width of the interval of
  /// their difference, which is paired by query. Its error is divided among all pairs.
  bool is_order_settled(std::span<const CellRecord* const> cells, const TraceRecord& trace) const;
  /// Eval queries of a sample that reaches the half width if its variance is that of this one, a tenth more of them,
  /// and an even number; at most all.
  int queries_needed(std::span<const CellRecord* const> cells, const TraceRecord& trace) const;
};

}  // namespace kvreplay
