#include "policies/arithmetic/top_share.h"

#include <algorithm>
#include <cstddef>
#include <functional>

#include "observables/softmax.h"

namespace kvreplay {
namespace {

/// The first of the weights in descending order whose cumulative sum exceeds `share`; the smallest if there is none, as
/// for a share of 1, which sums of rounded weights can exceed.
double least_read(std::vector<double> weights, double share) {
  constexpr std::size_t piece = 64;  // few weights have most of the sum: the others need no order
  const auto all = weights.begin();
  double sum = 0;
  std::size_t i = 0;
  for (std::size_t end = std::min(piece, weights.size());; end = std::min(2 * end, weights.size())) {
    const auto first = all + static_cast<std::ptrdiff_t>(i), last = all + static_cast<std::ptrdiff_t>(end);
    std::nth_element(first, last, weights.end(), std::greater{});
    std::sort(first, last, std::greater{});
    for (; i < end; ++i)
      if (i + 1 == weights.size() || ((sum += weights[i]) > share && share < 1)) return weights[i];
  }
}

}  // namespace

std::vector<std::int32_t> top_share(std::span<const double> logits, double share) {
  std::vector<std::int32_t> read;
  if (logits.empty()) return read;
  std::vector<double> weights(logits.begin(), logits.end());
  to_softmax(weights);
  const double least = least_read(weights, share);
  for (std::size_t j = 0; j < weights.size(); ++j)
    if (weights[j] >= least) read.push_back(static_cast<std::int32_t>(j));
  return read;
}

}  // namespace kvreplay
