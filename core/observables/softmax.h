// The softmax of a row of logits, noise for them, and counts of large weights. Last bits depend on the SIMD level
// (cpu/elementary_kernels.h).
#pragma once

#include <cstdint>
#include <limits>
#include <span>

namespace kvreplay {

/// Replaces logits by exp(z_j) / (exp(sink) + sum over i of exp(z_i)); all are 0 where every term is.
void to_softmax(std::span<double> logits, double sink = -std::numeric_limits<double>::infinity());

/// logits[i] = (logits[i] + G / ln 2) / tau, G = -ln(-ln u) with u = uniform(chained(chain, numbers[i])) of random.h: a
/// variate of the standard Gumbel distribution. Logits are in units of ln 2, as those of query_logits.h.
void add_gumbel_noise(std::uint64_t chain, std::span<const std::int32_t> numbers, double tau, std::span<float> logits);

/// counts[j] += 1 and last[j] = query where weights[j] > least.
void count_above(std::span<const double> weights, double least, std::int32_t query, std::span<double> counts,
                 std::span<double> last);

}  // namespace kvreplay
