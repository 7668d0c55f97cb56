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

/// Times each kind of backend call on a small random layer of the trace's shape and scales by its operation count.
Estimate estimate(Backend& backend, const Trace& trace, const Conditions& conditions, std::span<const Cell> cells);

}  // namespace kvreplay
