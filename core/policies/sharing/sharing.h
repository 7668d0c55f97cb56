// Layers that use another layer's set.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Layer l takes the set of layer floor(l / n) * n (ChunkKV, Algorithm 2: layer-wise index reuse).
Sharing every(int n);

/// Every n adjacent layers use the set of the last of them (SCA, Fig. 4).
Sharing last_of(int n);

/// How scores of all layers become those of one set for all of them: their mean or maximum over layers, row by row; or
/// the maximum over layers and rows, which gives all rows one set.
enum class LayerPool { mean, max, all_rows };
Sharing pooled_over_layers(LayerPool how);

/// All layers use the set of one layer; -1 is the last one, -2 the one before it.
Sharing one_layer(int layer);

}  // namespace kvreplay
