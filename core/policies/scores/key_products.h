// Projection of keys on one direction per KV head.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// [Hkv, n]: <k_j, u> of the resident tokens, keys as they are stored; `directions` is [Hkv, d].
Matrix key_products(const LayerView& view, const Matrix& directions);

}  // namespace kvreplay
