// Exponentials and logarithms of rows, once for each SIMD level in the binary (simd_level.h).
#pragma once

#include <cstddef>

namespace kvreplay {

/// By Highway's polynomials, within 4 units in the last place; the last bits depend on the SIMD level.
struct ElementaryKernels {
  /// x[i] = exp(x[i] - most) for i < n, 0 for -infinity; returns their sum.
  double (*exponentials)(double* x, std::ptrdiff_t n, double most);
  /// x[i] = -ln(-ln x[i]) for i < n: variates of the standard Gumbel distribution from uniform ones in (0, 1).
  void (*gumbel_variates)(double* x, std::ptrdiff_t n);
};

/// The kernels of the level that choose_simd_level() chooses. Throws as it does.
const ElementaryKernels& elementary_kernels();

}  // namespace kvreplay
