#include "observables/softmax.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "cpu/elementary_kernels.h"

namespace kvreplay {

void to_softmax(std::span<double> logits, double sink) {
  const ElementaryKernels& kernels = elementary_kernels();
  const auto count = static_cast<std::ptrdiff_t>(logits.size());
  const double most = kernels.largest(logits.data(), count, sink);
  if (most == -std::numeric_limits<double>::infinity()) {
    std::ranges::fill(logits, 0.0);
    return;
  }
  const double sum = std::exp(sink - most) + kernels.exponentials(logits.data(), count, most);
  for (double& weight : logits) weight /= sum;
}

void gumbel_variates(std::uint64_t chain, std::span<const std::int32_t> numbers, std::span<double> noise) {
  elementary_kernels().gumbel_variates(chain, numbers.data(), static_cast<std::ptrdiff_t>(numbers.size()),
                                       noise.data());
}

}  // namespace kvreplay
