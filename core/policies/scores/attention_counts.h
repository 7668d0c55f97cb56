// How often a token had more than its share of attention (Liu et al. 2023, Scissorhands, arXiv:2305.17118).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// [H, n]: of the last `history` queries so many as give the token more than the uniform share of what they see, summed
/// over a row's query heads; of equal counts the greater sum of that attention wins, and its place in that order is the
/// fraction. Or that sum itself.
struct AttentionCounts {
  int history = 400;
  bool binary = true;

  void parameters(Parameters& p);
  Scorer scorer() const;
};

}  // namespace kvreplay
