#include "policies/arithmetic/top_share.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace kvreplay {

std::vector<std::int32_t> top_share(std::span<const double> logits, double share) {
  std::vector<std::int32_t> read;
  if (logits.empty()) return read;
  const double most = std::ranges::max(logits);
  std::vector<double> weights;
  for (const double logit : logits) weights.push_back(std::exp(logit - most));
  std::vector<double> sorted = weights;
  std::ranges::sort(sorted, std::greater{});
  const double total = std::accumulate(sorted.begin(), sorted.end(), 0.0);
  double sum = 0;
  std::size_t i = 0;
  for (; i + 1 < sorted.size(); ++i)
    if ((sum += sorted[i]) / total > share) break;
  for (std::size_t j = 0; j < weights.size(); ++j)
    if (weights[j] >= sorted[i]) read.push_back(static_cast<std::int32_t>(j));
  return read;
}

}  // namespace kvreplay
