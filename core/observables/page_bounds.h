// Keys in pages, each known by the least and the greatest number of every channel (Tang et al. 2024, Quest,
// arXiv:2406.10774) or by its mean.
//
// Host code: O(n d), one reading of the keys, and O(n d / page) for a query.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "matrix.h"
#include "observables/vector_statistics.h"
#include "tensor.h"

namespace kvreplay {

/// [heads, pages * 2d], of tokens [0, tokens): d minima, then d maxima of each page.
Matrix page_bounds(const TensorView& keys, int tokens, int page, int threads);

/// [heads, pages * d]: the mean of the vectors of each page.
Matrix page_means(const Vectors& vectors, int page, int threads);

/// [pages]: what a key within the bounds of each page can have at most as a product with the query,
/// Σ_c max(q_c min_c, q_c max_c). `bounds` is a row of the above or its first pages.
std::vector<double> page_scores(std::span<const double> query, std::span<const double> bounds);

}  // namespace kvreplay
