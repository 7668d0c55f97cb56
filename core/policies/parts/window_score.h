// Attention that the last prompt queries pay to the tokens before them: the score of SnapKV and its relatives.
#pragma once

#include "policies/parts/grouping.h"
#include "policies/parts/pooling.h"
#include "policies/policy.h"

namespace kvreplay {

/// [H, P]: window attention, its query heads reduced by the grouping, pooled over neighbours before the window.
struct WindowScore {
  int window = 8;
  int kernel = 7;
  Pool pool = Pool::max;
  PoolOrder order = PoolOrder::group_first;
  Grouping grouping = {};

  void parameters(Parameters& p);
  Matrix operator()(const LayerView& view) const;
};

}  // namespace kvreplay
