#include "attention/rope.h"

#include <cmath>
#include <cstddef>

namespace kvreplay {

void rotate(const Rope& rope, int distance, std::span<float> vector) {
  if (distance == 0) return;
  const std::size_t pairs = rope.inv_freq.size();
  for (std::size_t i = 0; i < pairs; ++i) {
    const double angle = static_cast<double>(distance) * rope.inv_freq[i];
    const double cosine = std::cos(angle);
    const double sine = std::sin(angle);
    float& first = vector[rope.interleaved ? 2 * i : i];
    float& second = vector[rope.interleaved ? 2 * i + 1 : i + pairs];
    const double x = static_cast<double>(first);
    const double y = static_cast<double>(second);
    first = static_cast<float>(x * cosine - y * sine);
    second = static_cast<float>(x * sine + y * cosine);
  }
}

}  // namespace kvreplay
