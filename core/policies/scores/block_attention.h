// Non-causal attention within blocks (Chari and Van Durme 2025, Compactor, arXiv:2507.08143).
#pragma once

#include "matrix.h"
#include "observables/layer_view.h"

namespace kvreplay {

/// [Hq, n]: column sums of softmax_j(<q_t, k_j>) without scale, softcap or causal mask, within blocks of `block`
/// resident tokens, counted from the first of them; the last block may be short. Keys and queries as they are stored: a
/// block is a layer of its own, whose queries come after all of its keys.
const Matrix& block_attention(const LayerView& view, int block);

}  // namespace kvreplay
