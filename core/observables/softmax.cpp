#include "observables/softmax.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "cpu/elementary_kernels.h"

namespace kvreplay {

void to_softmax(std::span<double> logits, double sink) {
  double most = sink;
  for (const double logit : logits) most = std::max(most, logit);
  if (most == -std::numeric_limits<double>::infinity()) {
    std::ranges::fill(logits, 0.0);
    return;
  }
  const double sum = std::exp(sink - most) +
                     elementary_kernels().exponentials(logits.data(), static_cast<std::ptrdiff_t>(logits.size()), most);
  for (double& weight : logits) weight /= sum;
}

void to_gumbel_variates(std::span<double> uniforms) {
  elementary_kernels().gumbel_variates(uniforms.data(), static_cast<std::ptrdiff_t>(uniforms.size()));
}

}  // namespace kvreplay
