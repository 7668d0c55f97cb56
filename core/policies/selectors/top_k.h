// The highest-scored tokens, beside protected tokens.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Sinks, recent window, and the best of the tokens between them.
Selector top_k();

/// The best tokens anywhere for the slots beside sinks and recent window, and these: if they overlap, fewer than B are
/// kept (the mask of H2O's lm-eval code).
Selector top_k_anywhere();

}  // namespace kvreplay
