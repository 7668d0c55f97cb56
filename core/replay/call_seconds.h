// Seconds that the backend's calls take on this machine, timed on a small random layer.
#pragma once

#include <array>
#include <map>
#include <memory>

#include "attention/backend.h"
#include "trace/trace.h"

namespace kvreplay {

inline constexpr int sample_tokens = 2048;
inline constexpr int sample_queries = 64;
// Of the calls that are slow for their size: queries of a general comparison, tokens of a greedy algorithm.
inline constexpr int sample_few_queries = 8;
inline constexpr int sample_steps = 256;

/// What is timed.
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

class CallSeconds {
 public:
  /// `backend` must outlive it.
  explicit CallSeconds(Backend& backend);
  ~CallSeconds();

  /// Timed once for each shape of heads.
  double operator()(Call call, const LayerShape& shape);

 private:
  /// A random float32 layer of some shape of heads, and the seconds of the calls that were timed on it.
  struct Sample;
  double timed(Call call, const LayerShape& shape, const LayerTensors& sample);

  Backend& backend_;
  std::map<std::array<int, 4>, std::unique_ptr<Sample>> samples_;  // by query heads, KV heads, d, dv
};

}  // namespace kvreplay
