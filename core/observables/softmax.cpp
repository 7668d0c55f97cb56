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

void add_gumbel_noise(std::uint64_t chain, std::span<const std::int32_t> numbers, double tau, std::span<float> logits) {
  elementary_kernels().add_gumbel_noise(chain, numbers.data(), static_cast<std::ptrdiff_t>(numbers.size()),
                                        static_cast<float>(tau), logits.data());
}

void count_above(std::span<const double> weights, double least, std::int32_t query, std::span<double> counts,
                 std::span<double> last) {
  elementary_kernels().count_above(weights.data(), static_cast<std::ptrdiff_t>(weights.size()), least,
                                   static_cast<double>(query), counts.data(), last.data());
}

}  // namespace kvreplay
