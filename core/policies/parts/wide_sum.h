// Sums that do not depend on the order of what is added: tokens tie where their neighbours are the same in another
// order.
#pragma once

#include <cmath>

namespace kvreplay {

/// sum += x; what rounding drops of it is added to `dropped` (Knuth's TwoSum).
inline void add_keeping(double& sum, double& dropped, double x) {
  const double total = sum + x, added = total - sum;
  dropped += (sum - (total - added)) + (x - added);
  sum = total;
}

/// The sum with what was dropped, rounded once; infinite where it is.
inline double rounded_sum(double sum, double dropped) { return std::isfinite(sum) ? sum + dropped : sum; }

}  // namespace kvreplay
