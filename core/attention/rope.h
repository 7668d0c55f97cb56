// Moving a rotated vector to another position.
#pragma once

#include <span>

#include "trace/tensor.h"

namespace kvreplay {

/// rot(x, distance): turns pair i of `vector` by distance * inv_freq[i] radians, angles in float64. The stored vector
/// carries attention_scaling already; it is not applied again.
void rotate(const Rope& rope, int distance, std::span<float> vector);

}  // namespace kvreplay
