// The softmax of a row of logits, and noise for them. Last bits depend on the SIMD level (cpu/elementary_kernels.h).
#pragma once

#include <limits>
#include <span>

namespace kvreplay {

/// Replaces logits by exp(z_j) / (exp(sink) + sum over i of exp(z_i)); all are 0 where every term is.
void to_softmax(std::span<double> logits, double sink = -std::numeric_limits<double>::infinity());

/// Replaces numbers in (0, 1) by -ln(-ln x): of uniform numbers, variates of the standard Gumbel distribution.
void to_gumbel_variates(std::span<double> uniforms);

}  // namespace kvreplay
