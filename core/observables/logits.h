// How large the logits of a query become: what the rounding of float32 grows with.
#pragma once

#include <cstdint>

#include "tensor.h"

namespace kvreplay {

/// max |z| over the keys that the query at `position` sees, z = <q, k> * scale under the softcap. Throws as
/// query_places.
double largest_logit(const LayerTensors& layer, std::int32_t position, int query_head);

}  // namespace kvreplay
