// Slots to the heads of a layer that its best entries lie in, and a floor for the others (Feng et al. 2024, Ada-KV,
// arXiv:2407.11550).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// With b slots a head, H heads, and c_h of the layer's b H best entries in head h: apportion(b H, (1 - alpha) c_h +
/// alpha b), no head more than it has candidates. `normalise`: entries are ranked after each head's were multiplied by
/// what its b best have of their sum (the PyramidKV code).
struct AdaptiveHeads {
  double alpha = 0.2;  // read in thousandths, so that weights are whole numbers
  bool normalise = false;

  void parameters(Parameters& p);
  WithinLayer allocator() const;
};

}  // namespace kvreplay
