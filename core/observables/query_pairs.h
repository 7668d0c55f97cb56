// What the queries of a prompt have in common before RoPE, pair by pair.
//
// Host code: O(P d) for a head, in float64.
#pragma once

#include "matrix.h"
#include "tensor.h"

namespace kvreplay {

/// [Hq, 3 r] of the queries at positions [0, tokens), un-rotated, for the r pairs of RoPE as complex numbers: real
/// parts of the mean, its imaginary parts, and means of the moduli. Throws Error{input} if a query is not stored.
Matrix query_pair_means(const LayerTensors& layer, int tokens, int threads);

/// The two components of pair i of a vector under RoPE.
struct PairPlace {
  std::size_t real = 0;
  std::size_t imaginary = 0;
};
PairPlace pair_place(const Rope& rope, std::size_t pair);

}  // namespace kvreplay
