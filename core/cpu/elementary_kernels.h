// Exponentials, logarithms and comparisons of rows, once for each SIMD level in the binary (simd_level.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvreplay {

/// Exponentials are by Highway's polynomials, within 4 units in the last place; the last bits depend on the SIMD level.
struct ElementaryKernels {
  /// The largest of x[i], i < n, and of `least`.
  double (*largest)(const double* x, std::ptrdiff_t n, double least);
  /// x[i] = exp(x[i] - most) for i < n, 0 for -infinity; returns their sum.
  double (*exponentials)(double* x, std::ptrdiff_t n, double most);
  /// logits[i] = (logits[i] + G / ln 2) / tau for i < n, G = -ln(-ln u) with u = uniform(chained(chain, x[i])): a
  /// variate of the standard Gumbel distribution, in float32; u keeps its digits near 0 and its distance to 1 near 1.
  /// Within 3e-7 (1 + |G / ln 2|), by a polynomial; the last bits depend on the SIMD level.
  void (*add_gumbel_noise)(std::uint64_t chain, const std::int32_t* x, std::ptrdiff_t n, float tau, float* logits);
  /// counts[i] += 1 and last[i] = number where x[i] > least, i < n.
  void (*count_above)(const double* x, std::ptrdiff_t n, double least, double number, double* counts, double* last);
  /// How many of a[i], i < n, equal b[i].
  double (*count_equal)(const double* a, const double* b, std::ptrdiff_t n);
};

/// The kernels of simd_level(). Throws as it does.
const ElementaryKernels& elementary_kernels();

}  // namespace kvreplay
