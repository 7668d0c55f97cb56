// Layers that use another layer's set.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Layer l takes the set of layer floor(l / n) * n (ChunkKV, Algorithm 2: layer-wise index reuse).
Sharing every(int n);

/// Of every n neighbouring layers the last one selects for all of them (SCA, Fig. 4).
Sharing last_of(int n);

/// One layer selects for all; -1 is the last one, -2 the one before it.
Sharing one_layer(int layer);

}  // namespace kvreplay
