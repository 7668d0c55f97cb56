// Layers that use another layer's set.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Layer l takes the set of layer floor(l / n) * n (ChunkKV, Algorithm 2: layer-wise index reuse).
Sharing every(int n);

}  // namespace kvreplay
