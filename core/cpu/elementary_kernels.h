// Exponentials and logarithms of rows, once for each SIMD level in the binary (simd_level.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvreplay {

/// Exponentials and logarithms are by Highway's polynomials, within 4 units in the last place; the last bits depend on
/// the SIMD level.
struct ElementaryKernels {
  /// The largest of x[i], i < n, and of `least`.
  double (*largest)(const double* x, std::ptrdiff_t n, double least);
  /// x[i] = exp(x[i] - most) for i < n, 0 for -infinity; returns their sum.
  double (*exponentials)(double* x, std::ptrdiff_t n, double most);
  /// logits[i] = (logits[i] + G / ln 2) / tau for i < n, G = -ln(-ln u) with u = uniform(chained(chain, x[i])): a
  /// variate of the standard Gumbel distribution, in float32; u keeps its digits near 0 and its distance to 1 near 1.
  void (*add_gumbel_noise)(std::uint64_t chain, const std::int32_t* x, std::ptrdiff_t n, float tau, float* logits);
};

/// The kernels of the level that choose_simd_level() chooses. Throws as it does.
const ElementaryKernels& elementary_kernels();

}  // namespace kvreplay
