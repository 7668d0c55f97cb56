// The best tokens by score, beside the first and the last ones that stay by rule.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Sinks, recent window, and the best of the tokens between them.
Selector top_k();

/// The best tokens anywhere, as many as have slots beside sinks and recent window, and these: where they overlap, fewer
/// than B stay (the mask of H2O's lm-eval code).
Selector top_k_anywhere();

}  // namespace kvreplay
