// Dividing a whole number of slots in proportion to weights: the one way in which budgets are divided.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvreplay {

/// A bound for each item, or one for all.
class Bound {
 public:
  Bound(int all) : all_(all) {}
  Bound(std::span<const int> each) : each_(each) {}
  Bound(const std::vector<int>& each) : each_(each) {}

  int operator[](std::size_t item) const { return each_.empty() ? all_ : each_[item]; }

 private:
  int all_ = 0;
  std::span<const int> each_ = {};
};

/// Whole numbers n_i, lo_i <= n_i <= hi_i, with the sum N' = min(total, Σ hi), as near to N' w_i / Σ w as the bounds
/// allow. Requires 0 <= lo_i <= hi_i, Σ lo <= total, w_i >= 0.
///
/// Of the items whose count is not fixed yet, item i is due x_i = (N' - Σ fixed) w_i / Σ w, or an equal share where
/// those weights are all 0. Items beyond a bound are fixed at it: those below lo where clamping all of them would hand
/// out too much, those above hi where too little, both where it is even; until none is left. The others get ⌊x_i⌋, and
/// the largest fractional parts one more each, ties to the lower index.
///
/// Whole weights are compared exactly.
std::vector<int> apportion(std::int64_t total, std::span<const std::int64_t> weights, Bound lo, Bound hi);
/// The same in double precision.
std::vector<int> apportion(std::int64_t total, std::span<const double> weights, Bound lo, Bound hi);

}  // namespace kvreplay
