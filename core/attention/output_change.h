// What the attention output would lose with a token.
#pragma once

#include <cstdint>
#include <span>

#include "matrix.h"
#include "trace/tensor.h"

namespace kvreplay {

/// [Hq, n]: ‖Σ_i w_hi v_i − v_j‖₂, v the values of `positions`, [rows, n] with one row for all KV heads or one for
/// each, and w `weights`, [Hq, n]. Host code: it reads each value twice, where attention reads each key once a query.
/// Query heads are shared out to `threads`; a head is summed by one, in float64 and in order.
Matrix distances_from_mean(const TensorView& values, std::span<const std::int32_t> positions, int rows,
                           const Matrix& weights, int threads);

}  // namespace kvreplay
