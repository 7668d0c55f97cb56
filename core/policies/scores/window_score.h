// Attention that the last queries pay to the tokens before them: the score of SnapKV and its relatives.
#pragma once

#include "policies/arithmetic/pooling.h"
#include "policies/policy.h"

namespace kvreplay {

enum class PoolOrder { group_first, pool_first };

/// [H, n]: window attention, its query heads reduced by the plan's grouping, pooled over neighbours before the recent
/// tokens that stay by rule.
struct WindowScore {
  int window = 8;
  int kernel = 7;
  Pool pool = Pool::max;
  PoolOrder order = PoolOrder::group_first;

  /// With the presets of published code, in which the window stays, too.
  void parameters(Parameters& p);
  Scorer scorer() const;
};

/// What the window family shares: SnapKV and the policies that differ from it in how they divide the budget.
struct WindowFamily {
  WindowScore score = {};
  Grouping grouping = {};

  void parameters(Parameters& p);
  /// SnapKV's own plan.
  Plan plan() const;
};

}  // namespace kvreplay
