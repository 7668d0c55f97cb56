// How the budget is divided over layers and heads.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Ranks (head, position) of a layer together: H*B slots go to its best entries; ties to the lower (head, position).
WithinLayer ranked_within_layer();

/// Ranks (layer, head, position) of all layers together: L*H*B slots.
AcrossLayers ranked_across_layers();

}  // namespace kvreplay
