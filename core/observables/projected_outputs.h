// What outputs of attention come to behind the output projection.
#pragma once

#include <span>
#include <vector>

#include "tensor.h"

namespace kvreplay {

/// [sets, queries]: ‖W_o x‖², x the vectors of all query heads side by side. `outputs` [sets, Hq, queries, d],
/// `projection` [1, hidden, Hq * d]. In float64; a number does not depend on the vectors beside it, nor on the number
/// of threads.
std::vector<double> projected_squares(const TensorView& projection, std::span<const float> outputs, int heads,
                                      int queries, int threads);

}  // namespace kvreplay
