// Linear combinations of rows, once for each SIMD level in the binary (simd_level.h).
#pragma once

#include <cstddef>

namespace kvreplay {

/// out[i] = Σ_c weights[c] rows[c · stride + i] for i < n and c < count. Each product and each sum is rounded, in the
/// order of c: the bits do not depend on the SIMD level.
struct CombinationKernels {
  void (*doubles)(const double* weights, int count, const double* rows, std::ptrdiff_t stride, int n, double* out);
  /// The same of several lists of weights, [lists, count]; list l to out + l · out_stride. Each row is read once for
  /// four of them.
  void (*lists_of_doubles)(const double* weights, int lists, int count, const double* rows, std::ptrdiff_t stride,
                           int n, double* out, std::ptrdiff_t out_stride);
  /// out[r] = Σ_c a[c] rows[r · n + c], c < n, r < count: eight sums, over every eighth c each, are added in order.
  void (*inner_products)(const double* a, const double* rows, int count, int n, double* out);
  /// The first of the columns i < n with the least Σ_c (vector[c] - rows[c · stride + i])².
  int (*nearest_column)(const double* vector, int count, const double* rows, std::ptrdiff_t stride, int n);
  /// sums[s][i] += weight row[i] for i < n and s < count, of which none is the row.
  void (*add_to_each)(double weight, const double* row, int n, double* const* sums, int count);
  void (*floats)(const float* weights, int count, const float* rows, std::ptrdiff_t stride, int n, float* out);
};

/// The kernels of simd_level(). Throws as it does.
const CombinationKernels& combination_kernels();

}  // namespace kvreplay
