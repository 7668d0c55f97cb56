// Per-layer budgets by the number of highest scores in each layer, updated while layers are processed (Zhou et al.
// 2024, DynamicKV, eqs. 1-8 and Algorithm 1).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Slots that N of L layers share at an update between layers. In the equations and the code: those of all L.
enum class MidTotal { full, proportional };
/// Normalisation of counts to weights: divided by their sum, or scaled to [0, 1], which gives the smallest count the
/// weight 0.
enum class CountNormalisation { sum, minmax };

/// Every row of a layer begins with min(b r_max, M) slots beside protected tokens, b their mean and M the
/// candidates. After each `update` layers, and after the last one, the layers so far share b L slots in proportion to
/// the number of the best b H N entries of all candidates in each of N layers (ties to the lower layer, head,
/// position); no layer gets more than it had. The sum is exactly L*b a row.
struct DynamicAllocation {
  double r_max = 10;
  int update = 4;
  MidTotal mid_total = MidTotal::full;
  CountNormalisation norm = CountNormalisation::sum;
  bool progressive = true;  // false: one update, after the last layer

  void parameters(Parameters& p);
  AcrossLayers allocator() const;
};

}  // namespace kvreplay
