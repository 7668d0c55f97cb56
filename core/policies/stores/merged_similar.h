// Merges the values of evicted tokens into those of the kept tokens with the most similar keys (NVIDIA/kvpress at
// 8bb29b9, merging_press.py).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Each token e of a KV head that is evicted has as its target the token with the largest cosine of their keys among
/// those that then remain, of equal ones the first:
///   c = <k_e, k_j> / (max(|k_e|, 1e-6) max(|k_j|, 1e-6))
/// It merges if c >= `similarity_threshold` and c is among the 1 + floor(`merge_fraction` (n - 1)) largest of the n
/// tokens of the head that are evicted at once, where those below the threshold are last and equal ones merge together.
/// All e with target j change its value at once, norms being those before:
///   v_j <- (v_j + sum of w_e v_e) / (1 + sum of w_e),  w_e = c |v_e| / (|v_e| + |v_j| + 1e-6)
struct MergedSimilar {
  double similarity_threshold = 0;
  double merge_fraction = 1;

  void parameters(Parameters& p);
  StorePtr store() const;
};

}  // namespace kvreplay
