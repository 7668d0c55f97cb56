// Per-layer budgets by the entropy of the scores: more slots for layers with spread-out scores.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// A layer's slots are in proportion to e = −Σ p ln p / ln(H M), p its H M candidates' scores, which must not be
/// negative, over their sum; within the layer they go to its best entries, c_h to head h. With b slots a head on
/// average and F = `floor`, head h then gets (1 − F) c_h + F b, divided among the heads of all layers by apportion
/// (Shen et al. 2025, arXiv:2509.09754, and its code).
struct EntropyAllocation {
  double floor = 0.2;  // read in thousandths, so that weights are whole numbers

  void parameters(Parameters& p);
  AcrossLayers allocator() const;
};

}  // namespace kvreplay
