// Per-layer budgets that shrink by a factor from layer to layer (Yang et al. 2024, PyramidInfer, arXiv:2405.12532).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

enum class DecayCurve { cosine, linear, constant };

/// The part of layer l's context tokens that layer l+1 keeps, rho_l:
///   cosine    r + (1 - r) (1 + cos(pi l / L)) / 2
///   linear    r + (1 - r) l / L
///   constant  r
struct Decay {
  double r = 0.9;
  DecayCurve curve = DecayCurve::cosine;

  void parameters(Parameters& p);

  double factor(int layer, int layers) const;

  /// The budget, divided in proportion to u_0 = 1, u_{l+1} = u_l rho_l: sizes never grow with depth.
  ByLayer scaled() const;

  /// The sizes of PyramidInfer's code, which ignore the budget. Tokens pruned by layer l are missing from layer l+1 on,
  /// so the first layer holds the whole prompt. The candidates shrink to floor(rho_l of them) after layer l,
  /// unless 64 or fewer would remain.
  ByLayer natural() const;
};

}  // namespace kvreplay
