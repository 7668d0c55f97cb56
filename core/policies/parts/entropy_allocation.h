// More slots for layers whose scores are spread over more tokens.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// A layer's slots are in proportion to e = −Σ p ln p / ln(H M), p its H M candidates' scores, which must not be
/// negative, over their sum; within the layer they go to its best entries (Shen et al. 2025, arXiv:2509.09754).
AcrossLayers by_entropy();

}  // namespace kvreplay
