// What a replay will cost, before it starts.
#pragma once

#include <cstddef>
#include <span>

#include "replay/call_seconds.h"
#include "replay/replay.h"

namespace kvreplay {

struct Estimate {
  double seconds = 0;            // 0 unless set from Estimator::seconds
  std::size_t memory_bytes = 0;  // anonymous memory at its peak; the mapped trace is not counted
  std::size_t mapped_bytes = 0;  // of the largest layer, mapped while it is in use
  std::size_t disk_bytes = 0;    // results of the run
};

/// What a run wants beside its cells.
struct Demand {
  double similarity_passes = 2;   // tensors a layer whose tokens are compared with one another, a mean over layers
  double cumulative_share = 1;    // of the layers whose cumulative attention is computed if a policy wants it
  bool every_query = false;       // moments at all tokens of the trace too
  bool save_scores = false;       // float32 [H, P] of each cell and layer
  bool save_attention = false;    // float32 [Hq, P] of each layer
  std::size_t earlier_bytes = 0;  // of the file that the results are added to
};

/// Estimates memory, disk space and time from the plans of the cells.
class Estimator {
 public:
  /// `backend` must outlive the estimator.
  explicit Estimator(Backend& backend) : backend_(backend), seconds_(backend) {}

  Estimate operator()(const Trace& trace, const Conditions& conditions, std::span<const Cell> cells,
                      const Demand& demand = {}) const;
  /// Times the kinds of backend calls that the plan needs on a small random layer, which takes about as long as a short
  /// trace does, and scales by operation counts.
  double seconds(const Trace& trace, const Conditions& conditions, std::span<const Cell> cells,
                 const Demand& demand = {});

 private:
  Backend& backend_;
  CallSeconds seconds_;
};

}  // namespace kvreplay
