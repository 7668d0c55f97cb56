// Layers that share the slots by how many of the best entries they have, while the prompt runs through them (Zhou et
// al. 2024, DynamicKV, eqs. 1-8 and Algorithm 1).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// What N of L layers share at an update between the layers. The equations and the code: what all L have.
enum class MidTotal { full, proportional };
/// What becomes of the counts before they are weights: divided by their sum, or moved to [0, 1], which starves the
/// smallest.
enum class CountNormalisation { sum, minmax };

/// Every row of a layer begins with min(b r_max, M) slots beside what stays by rule, b being their mean and M the
/// candidates. After each `update` layers, and after the last one, the layers so far share b L slots in proportion to
/// how many of the best b H N entries of all candidates each of N layers has (ties to the lower layer, head, position);
/// none gets more than it had. The sum is exactly L*b a row.
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
