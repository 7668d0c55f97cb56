// Counts of queries that give a token more than average attention (Liu et al. 2023, Scissorhands, arXiv:2305.17118).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// [H, n]: number of the last `history` queries that give the token more than 1 / (visible tokens), summed over a row's
/// query heads. Equal counts are ordered by the sum of that attention; the rank in this order is the fraction of the
/// score. Without `binary`, the score is that sum.
struct AttentionCounts {
  int history = 400;
  bool binary = true;

  void parameters(Parameters& p);
  Scorer scorer() const;
};

}  // namespace kvreplay
