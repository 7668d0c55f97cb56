// How large values are behind the output projection (Feng et al. 2025, CriticalKV, arXiv:2502.03805).
//
// Host code: the products, O(n d hidden) for a query head, are as many as a layer's own projection of its prompt, and
// are made once a layer in blocks that stay in cache.
#pragma once

#include "matrix.h"
#include "tensor.h"

namespace kvreplay {

/// [Hq, tokens]: Σ_r |Σ_c W_o[r, h d + c] v_j[c]|, v_j of the query head's KV head; `group` query heads share one.
/// Products in float32, in one order whatever the number of threads; the sum over rows of W_o in float64.
Matrix projected_norms(const TensorView& values, const TensorView& projection, int group, int tokens, int threads);

}  // namespace kvreplay
