#include "policies/stores/hadamard.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace kvreplay {

void rotate_by_hadamard(std::span<float> vector, int block) {
  const auto size = static_cast<std::size_t>(block);
  const double scale = 1.0F / std::sqrt(static_cast<float>(block));
  std::vector<double> sums(size);
  for (std::size_t first = 0; first < vector.size(); first += size) {
    const std::span<float> numbers = vector.subspan(first, size);
    std::ranges::copy(numbers, sums.begin());
    for (std::size_t half = 1; half < size; half *= 2)
      for (std::size_t i = 0; i < size; ++i) {
        if ((i & half) != 0) continue;
        const double low = sums[i], high = sums[i + half];
        sums[i] = low + high;
        sums[i + half] = low - high;
      }
    std::ranges::transform(sums, numbers.begin(), [scale](double sum) { return static_cast<float>(sum * scale); });
  }
}

}  // namespace kvreplay
