// What a replay will cost, before it starts: short measurements on this machine, scaled to the trace.
#pragma once

#include <cstddef>
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

/// Times each kind of backend call on a small random layer of the trace's shape and scales by its operation count.
Estimate estimate(Backend& backend, const Trace& trace, const Conditions& conditions, std::span<const Cell> cells,
                  const Demand& demand = {});

}  // namespace kvreplay
