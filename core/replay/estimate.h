// What a replay will cost, before it starts: short measurements on this machine, scaled to the trace.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <span>

#include "replay/replay.h"

namespace kvreplay {

struct Estimate {
  double seconds = 0;
  std::size_t memory_bytes = 0;  // anonymous memory at its peak; the mapped trace is not counted
  std::size_t disk_bytes = 0;    // results of the run
};

/// What a run wants beside its cells.
struct Demand {
  int similarity_passes = 2;    // tensors of each layer whose tokens are compared with one another
  bool every_query = false;     // moments at all tokens of the trace too
  bool save_scores = false;     // float32 [H, P] of each cell and layer
  bool save_attention = false;  // float32 [Hq, P] of each layer
};

/// Times each kind of backend call on a small random layer, once for each shape of heads, and scales by operation
/// counts.
class Estimator {
 public:
  /// `backend` must outlive the estimator.
  explicit Estimator(Backend& backend) : backend_(backend) {}

  Estimate operator()(const Trace& trace, const Conditions& conditions, std::span<const Cell> cells,
                      const Demand& demand = {});

 private:
  /// Seconds of the backend's calls on the sample layer.
  struct Rates {
    double cumulative = 0;  // all sample tokens over themselves
    double rows = 0;        // some sample queries over the sample tokens
    double moments = 0;     // the same for kept moments, sets that keep nothing
    double kept = 0;        // and for each set that keeps everything
    double similarity = 0;  // sample tokens with one another
  };

  const Rates& rates_of(const TraceHeader& header);

  Backend& backend_;
  std::map<std::array<int, 3>, Rates> rates_;  // by query heads, KV heads, head dimension
};

}  // namespace kvreplay
