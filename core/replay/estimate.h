// What a replay will cost, before it starts: short measurements on this machine, scaled to the trace.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <span>

#include "replay/replay.h"

namespace kvreplay {

struct Estimate {
  double seconds = 0;
  std::size_t memory_bytes = 0;  // anonymous memory at its peak; the mapped trace is not counted
  std::size_t mapped_bytes = 0;  // of the largest layer, mapped while it is in use
  std::size_t disk_bytes = 0;    // results of the run
};

/// What a run wants beside its cells.
struct Demand {
  double similarity_passes = 2;  // tensors a layer whose tokens are compared with one another, a mean over layers
  double cumulative_share = 1;   // of the layers whose cumulative attention is computed if a policy wants it
  bool every_query = false;      // moments at all tokens of the trace too
  bool save_scores = false;      // float32 [H, P] of each cell and layer
  bool save_attention = false;   // float32 [Hq, P] of each layer
};

/// Times the kinds of backend calls that the plan needs on a small random layer, and scales by operation counts.
class Estimator {
 public:
  /// `backend` must outlive the estimator.
  explicit Estimator(Backend& backend);
  ~Estimator();

  Estimate operator()(const Trace& trace, const Conditions& conditions, std::span<const Cell> cells,
                      const Demand& demand = {});

 private:
  /// What is timed, on a sample layer.
  enum class Call {
    cumulative,  // all sample tokens over themselves
    rows,        // some sample queries over the sample tokens
    moments,     // the same for kept moments of no set
    sets,        // and for each set: sums of attention
    outputs,     // outputs of each set that keeps everything
    others,      // logits and unaligned products of each set
    projection,  // outputs of some sample queries behind a projection of as many rows as sample tokens
    similarity,  // sample tokens with one another
    comparison,  // the general comparison at a few queries
    online,      // some tokens coming one by one, half of them held
    redundancy   // some tokens, half of them kept
  };

  /// Seconds of a call, timed once for each shape of heads.
  double seconds(Call call, const TraceHeader& header);

  /// A random float32 layer of some shape of heads, and the seconds of the calls that were timed on it.
  struct Sample;

  Backend& backend_;
  std::map<std::array<int, 3>, std::unique_ptr<Sample>> samples_;  // by query heads, KV heads, head dimension
};

}  // namespace kvreplay
