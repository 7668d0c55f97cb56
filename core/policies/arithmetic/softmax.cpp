#include "policies/arithmetic/softmax.h"

#include <algorithm>
#include <cmath>

namespace kvreplay {

void to_softmax(std::span<double> logits, double sink) {
  double most = sink;
  for (const double logit : logits) most = std::max(most, logit);
  if (most == -std::numeric_limits<double>::infinity()) {
    std::ranges::fill(logits, 0.0);
    return;
  }
  double sum = std::exp(sink - most);
  for (double& logit : logits) sum += logit = std::exp(logit - most);
  for (double& weight : logits) weight /= sum;
}

}  // namespace kvreplay
