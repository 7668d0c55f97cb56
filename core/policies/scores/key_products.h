// Keys along one direction for each KV head.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// [Hkv, n]: <k_j, u> of what is resident, keys as they are stored; `directions` is [Hkv, d].
Matrix key_products(const LayerView& view, const Matrix& directions);

}  // namespace kvreplay
