// The highest-scored tokens for some slots, sampled tokens for the others (Chen et al. 2024, NACL,
// arXiv:2408.03675).
#pragma once

#include <cstdint>

#include "policies/policy.h"

namespace kvreplay {

enum class SampleWeights {
  softmax,  // softmax(s / temperature)
  score     // s, not negative; tokens with weight 0 come last, by position
};

/// Of the m slots between sinks and recent tokens floor(share m) are drawn, the others go to the best tokens. Tokens
/// that are not among these are drawn without replacement, in proportion to their weights: those of the largest
/// ln(weight) - ln(-ln u), u of chain(seed, stored layer, row, position) (Gumbel's maxima; Kool et al. 2019,
/// arXiv:1903.06059). With `score`, evictions after the first also enter the number of tokens so far into the chain.
struct Sampled {
  double share = 0.3;
  double temperature = 1.0;
  std::uint64_t seed = 0;
  SampleWeights weights = SampleWeights::softmax;

  /// All but `weights`.
  void parameters(Parameters& p);
  Selector selector() const;
};

}  // namespace kvreplay
