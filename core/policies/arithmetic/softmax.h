// The softmax of a row of logits.
#pragma once

#include <limits>
#include <span>

namespace kvreplay {

/// Replaces logits by exp(z_j) / (exp(sink) + sum over i of exp(z_i)); all are 0 where every term is.
void to_softmax(std::span<double> logits, double sink = -std::numeric_limits<double>::infinity());

}  // namespace kvreplay
