// Product quantisation: vectors in parts, each represented by the nearest of a few centres.
//
// Host code: O(iterations n 2^bits d) for a head, in float64.
#pragma once

#include <algorithm>
#include <cstdint>

#include "matrix.h"
#include "observables/vector_statistics.h"

namespace kvreplay {

struct ProductQuantiser {
  int parts = 2;  // of floor(d / parts) components; what is left over is ignored
  int bits = 6;   // 2^bits centres for each head and part, at most one for each vector
  int iterations = 10;
  std::uint64_t seed = 0;
  int layer = 0;  // with the seed, a coordinate of the random numbers

  int centres(int vectors) const { return std::min(1 << bits, vectors); }
};

/// k-means. The first centres are the vectors with the smallest chain(seed, layer, head, part, i), in this
/// order. In each iteration, counted from 0, every vector is assigned to the nearest centre, of equally near ones the
/// first. Then each centre becomes the mean of its vectors, or without any the vector with the number chain(seed,
/// layer, head, part, centre, iteration) mod n. The iterations end early when in every head and part (Σ over centres of
/// the distance moved)^2 < 1e-4.
///
/// [heads * parts, centres * floor(d / parts) + n]: for each head and part the centres, and then for each vector the
/// number of its centre in the last assignment, which came before the last change of the centres.
Matrix product_codes(const Vectors& vectors, const ProductQuantiser& how, int threads);

}  // namespace kvreplay
