// The best tokens by score, beside the first and the last ones that stay by rule.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Tokens that stay by rule: min(sinks, B) at the head, then as many recent ones as the budget still holds.
struct Protection {
  int sinks = 0;
  Amount recent = Amount::tokens(0);  // a fraction is one of the budget

  struct Clamped {
    int sinks;
    int recent;
  };
  Clamped within(int budget) const;
};

/// Sinks, recent window, and the best of the tokens between them.
Selector top_k(Protection protection);

/// The best B - recent tokens anywhere, and the recent window: where the two overlap, fewer than B stay (the mask of
/// H2O's lm-eval code).
Selector top_k_anywhere(Protection protection);

}  // namespace kvreplay
