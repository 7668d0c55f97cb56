// Positions of kept tokens as a parameter, and helpers of stores that change tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "policies/policy.h"

namespace kvreplay {

void add_positions(Parameters& p, Positions& positions);

/// The store that keeps original positions, or moves tokens to contiguous cache positions.
StorePtr store_at(Positions positions);

/// The layer's own keys and values, to be changed; its bytes are not counted yet.
std::unique_ptr<StoredLayer> exact_copy(const LayerView& view);

/// Tokens of the prompt that a KV head holds, ascending; the sets are one for each KV head, or one for the layer.
std::vector<std::int32_t> held_of_prompt(const LayerView& view, const KeptSet& kept, int kv_head);

}  // namespace kvreplay
