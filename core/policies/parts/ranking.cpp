#include "policies/parts/ranking.h"

#include <algorithm>
#include <numeric>

namespace kvreplay {

std::vector<std::int32_t> largest(std::span<const double> scores, int count) {
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto wanted = std::min(static_cast<std::size_t>(std::max(count, 0)), order.size());
  const auto cut = order.begin() + static_cast<std::ptrdiff_t>(wanted);
  const auto before = [scores](std::int32_t a, std::int32_t b) {
    const double score_a = scores[static_cast<std::size_t>(a)], score_b = scores[static_cast<std::size_t>(b)];
    return score_a != score_b ? score_a > score_b : a < b;
  };
  if (wanted > 0 && wanted < order.size()) std::nth_element(order.begin(), cut - 1, order.end(), before);
  order.erase(cut, order.end());
  std::ranges::sort(order);
  return order;
}

}  // namespace kvreplay
