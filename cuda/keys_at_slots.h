// Keys as they would stand at their slots.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tensor.h"

namespace kvreplay {

/// [resident, depth]: key resident[i] of all heads side by side, turned back to position i, and zeros up to `depth`
/// numbers. In float64, with the sines, cosines and roundings of the CPU backend.
std::vector<double> keys_at_slots(const LayerTensors& layer, std::span<const std::int32_t> resident, int depth,
                                  int threads);

}  // namespace kvreplay
