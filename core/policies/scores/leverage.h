// Leverage scores of the keys (Chari and Van Durme 2025, Compactor, arXiv:2507.08143).
#pragma once

#include <cstdint>

#include "policies/policy.h"

namespace kvreplay {

/// z-scores: standard deviations from the mean, over all rows and columns together; 0 if all numbers are equal.
Matrix z_scores(Matrix scores);

/// z-scores [Hkv, n] of x_j' (X'X + ridge I)^-1 x_j, X the resident keys before RoPE minus their mean: all of their
/// channels, or `sketch` random combinations, X Phi with Phi Gaussian / sqrt(sketch).
struct Leverage {
  int sketch = 0;
  double ridge = 0.01;
  std::uint64_t seed = 0;

  /// All but the ridge.
  void parameters(Parameters& p);
  const Matrix& operator()(const LayerView& view) const;
};

}  // namespace kvreplay
