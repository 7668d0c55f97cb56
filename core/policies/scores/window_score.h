// Attention of the observation window: the score of SnapKV and related policies.
#pragma once

#include "policies/arithmetic/pooling.h"
#include "policies/policy.h"

namespace kvreplay {

enum class PoolOrder { group_first, pool_first };

/// Declares `window`.
void add_window(Parameters& p, int& window);

/// [H, n]: window attention, its query heads reduced by the plan's grouping, pooled over neighbouring tokens before
/// the protected recent tokens.
struct WindowScore {
  int window = 8;
  int kernel = 7;
  Pool pool = Pool::max;
  PoolOrder order = PoolOrder::group_first;

  /// With the presets of published code, which also keeps the window's own tokens.
  void parameters(Parameters& p);
  Scorer scorer() const;
};

/// The common part of the window family: SnapKV, and policies that differ from it in budget allocation.
struct WindowFamily {
  WindowScore score = {};
  Grouping grouping = {};

  void parameters(Parameters& p);
  /// SnapKV's own plan.
  Plan plan() const;
};

}  // namespace kvreplay
