#include "policies/arithmetic/apportion.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>

#include "error.h"

namespace kvreplay {
namespace {

__extension__ typedef __int128 Wide;  // holds a product of slots and whole weights

/// Σ of a bound over all items.
std::int64_t sum_of(const Bound& bound, std::size_t items) {
  std::int64_t sum = 0;
  for (std::size_t item = 0; item < items; ++item) sum += bound[item];
  return sum;
}

template <class Weight>
class Apportionment {
 public:
  Apportionment(std::int64_t total, std::span<const Weight> weights, Bound lo, Bound hi)
      : weights_(weights), lo_(lo), hi_(hi), counts_(weights.size()), open_(weights.size()) {
    std::iota(open_.begin(), open_.end(), std::size_t{0});
    if (const std::int64_t least = sum_of(lo, weights.size()); least > total)
      throw Error{Refusal::internal, "apportion", "lower bounds above the total", "at most " + std::to_string(total),
                  std::to_string(least)};
    rest_ = std::min(total, sum_of(hi, weights.size()));
  }

  std::vector<int> counts() && {
    Shares due = shares();
    while (fix_at_bounds(due)) due = shares();
    round(due);
    return std::move(counts_);
  }

 private:
  using Number = std::conditional_t<std::is_integral_v<Weight>, Wide, double>;

  /// x_i = numerators[i] / unit of the open items, in their order.
  struct Shares {
    std::vector<Number> numerators;
    Number unit = 1;
  };

  Shares shares() const {
    std::vector<Weight> weights;
    for (const std::size_t item : open_) weights.push_back(weights_[item]);
    Weight sum = std::accumulate(weights.begin(), weights.end(), Weight{0});
    if (sum == 0) {
      std::ranges::fill(weights, Weight{1});
      sum = static_cast<Weight>(weights.size());
    }
    Shares due;
    for (const Weight weight : weights) {
      if constexpr (std::is_integral_v<Weight>)
        due.numerators.push_back(Wide{rest_} * weight);
      else
        due.numerators.push_back(static_cast<double>(rest_) * weight / sum);
    }
    if constexpr (std::is_integral_v<Weight>) due.unit = sum;
    return due;
  }

  /// Whether any open item was fixed.
  bool fix_at_bounds(const Shares& due) {
    Number excess = 0;  // Σ (clamped share - share)
    for (std::size_t i = 0; i < open_.size(); ++i)
      excess += std::clamp(due.numerators[i], lo_[open_[i]] * due.unit, hi_[open_[i]] * due.unit) - due.numerators[i];
    std::vector<std::size_t> still_open;
    for (std::size_t i = 0; i < open_.size(); ++i) {
      const std::size_t item = open_[i];
      if (excess >= 0 && due.numerators[i] < lo_[item] * due.unit)
        set(item, lo_[item]);
      else if (excess <= 0 && due.numerators[i] > hi_[item] * due.unit)
        set(item, hi_[item]);
      else
        still_open.push_back(item);
    }
    const bool fixed_some = still_open.size() < open_.size();
    open_ = std::move(still_open);
    return fixed_some;
  }

  void round(const Shares& due) {
    std::vector<std::pair<Number, std::size_t>> fractions;  // in units
    for (std::size_t i = 0; i < open_.size(); ++i) {
      const Number numerator = due.numerators[i];
      if constexpr (std::is_integral_v<Weight>)
        set(open_[i], static_cast<int>(numerator / due.unit));
      else
        set(open_[i], static_cast<int>(std::floor(numerator)));
      fractions.emplace_back(numerator - counts_[open_[i]] * due.unit, open_[i]);
    }
    std::ranges::sort(fractions, [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first > b.first : a.second < b.second;
    });
    for (const auto& [fraction, item] : fractions)
      if (rest_ > 0 && counts_[item] < hi_[item]) set(item, counts_[item] + 1);
  }

  void set(std::size_t item, int count) {
    rest_ -= count - counts_[item];
    counts_[item] = count;
  }

  std::span<const Weight> weights_;
  Bound lo_, hi_;
  std::vector<int> counts_;
  std::vector<std::size_t> open_;  // items that are not fixed, ascending
  std::int64_t rest_ = 0;          // not handed out yet
};

}  // namespace

std::vector<int> apportion(std::int64_t total, std::span<const std::int64_t> weights, Bound lo, Bound hi) {
  return Apportionment<std::int64_t>(total, weights, lo, hi).counts();
}

std::vector<int> apportion(std::int64_t total, std::span<const double> weights, Bound lo, Bound hi) {
  return Apportionment<double>(total, weights, lo, hi).counts();
}

}  // namespace kvreplay
