// Per-head budgets by the number of a layer's highest scores in each head, with a minimum for every head (Feng et al.
// 2024, Ada-KV, arXiv:2407.11550).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// With b slots a head, H heads, and c_h of the layer's b H best entries in head h: apportion(b H, (1 - alpha) c_h +
/// alpha b), at most the candidates of a head. `normalise`: multiplies the entries of each head by the share of its b
/// best in their sum before they are ranked (the PyramidKV code).
struct AdaptiveHeads {
  double alpha = 0.2;  // read in thousandths, so that weights are whole numbers
  bool normalise = false;

  void parameters(Parameters& p);
  WithinLayer allocator() const;
};

}  // namespace kvreplay
