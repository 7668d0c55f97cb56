// Attention of the recent window, with larger weights for later queries (PyramidInfer, section 3.2).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// The keys of the softmax.
enum class Over { resident, all };

/// [H, n]: sum over the recent queries i = 0 ... w-1 of rho_i a(i, j); rho grows linearly from 1 to `distance_weight`
/// (w = 1: 1). The w recent tokens are Scoring::observing.
struct RecencyWindow {
  double distance_weight = 1.2;
  Over over = Over::resident;

  void parameters(Parameters& p);
  Scorer scorer() const;
};

}  // namespace kvreplay
