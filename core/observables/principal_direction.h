// The direction that queries share (Godey et al. 2025, Q-Filters, arXiv:2503.02812).
//
// Host code: QᵀQ takes O(n d²) for a head and no memory beyond it, its eigenvectors O(d³).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "matrix.h"
#include "tensor.h"

namespace kvreplay {

/// [Hq, d]: first right singular vector of the queries at these positions, ‖u‖ = 1, <mean q, u> >= 0. In float64, in
/// one order whatever the number of threads. Throws Error{input} where a query is not stored.
Matrix principal_directions(const LayerTensors& layer, std::span<const std::int32_t> positions, int threads);

/// [d]: eigenvector of the greatest eigenvalue of a symmetric matrix, [d, d], of length 1 and of any sign.
std::vector<double> first_eigenvector(std::span<const double> matrix, int dim);

}  // namespace kvreplay
