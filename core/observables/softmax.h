// The softmax of a row of logits, and noise for them. Last bits depend on the SIMD level (cpu/elementary_kernels.h).
#pragma once

#include <cstdint>
#include <limits>
#include <span>

namespace kvreplay {

/// Replaces logits by exp(z_j) / (exp(sink) + sum over i of exp(z_i)); all are 0 where every term is.
void to_softmax(std::span<double> logits, double sink = -std::numeric_limits<double>::infinity());

/// noise[i] = -ln(-ln u), u = uniform(chained(chain, numbers[i])) of random.h: variates of the standard Gumbel
/// distribution.
void gumbel_variates(std::uint64_t chain, std::span<const std::int32_t> numbers, std::span<double> noise);

}  // namespace kvreplay
