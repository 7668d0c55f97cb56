#include "policies/parts/ranking.h"

#include <algorithm>
#include <numeric>

namespace kvreplay {
namespace {

/// Whether index a ranks before index b.
struct Before {
  std::span<const double> scores;

  bool operator()(std::int32_t a, std::int32_t b) const {
    const double score_a = scores[static_cast<std::size_t>(a)], score_b = scores[static_cast<std::size_t>(b)];
    return score_a != score_b ? score_a > score_b : a < b;
  }
};

std::vector<std::int32_t> indices(std::span<const double> scores) {
  std::vector<std::int32_t> all(scores.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace

std::vector<std::int32_t> ranked(std::span<const double> scores) {
  std::vector<std::int32_t> order = indices(scores);
  std::ranges::sort(order, Before{scores});
  return order;
}

std::vector<std::int32_t> largest(std::span<const double> scores, int count) {
  std::vector<std::int32_t> order = indices(scores);
  const auto wanted = std::min(static_cast<std::size_t>(std::max(count, 0)), order.size());
  const auto cut = order.begin() + static_cast<std::ptrdiff_t>(wanted);
  if (wanted > 0 && wanted < order.size()) std::nth_element(order.begin(), cut - 1, order.end(), Before{scores});
  order.erase(cut, order.end());
  std::ranges::sort(order);
  return order;
}

}  // namespace kvreplay
