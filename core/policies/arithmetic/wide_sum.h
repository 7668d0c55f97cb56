// Sums that hardly depend on the order of what is added, to about 2^-106 of it: tokens tie where their neighbours are
// the same in another order.
#pragma once

#include <cmath>
#include <span>

namespace kvreplay {

/// sum += x; what rounding drops of it is added to `dropped` (Knuth's TwoSum).
inline void add_keeping(double& sum, double& dropped, double x) {
  const double total = sum + x, added = total - sum;
  dropped += (sum - (total - added)) + (x - added);
  sum = total;
}

/// The sum with what was dropped; infinite where it is.
inline double rounded_sum(double sum, double dropped) { return std::isfinite(sum) ? sum + dropped : sum; }

inline double wide_sum(std::span<const double> numbers) {
  double sum = 0, dropped = 0;
  for (const double x : numbers) add_keeping(sum, dropped, x);
  return rounded_sum(sum, dropped);
}

}  // namespace kvreplay
