#include "observables/vector_products.h"

#include <algorithm>
#include <cstddef>

namespace kvreplay {

VectorProducts::VectorProducts(const Vectors& vectors, int head)
    : count_(vectors.count),
      dim_(vectors.dim),
      channels_(static_cast<std::size_t>(vectors.count) * static_cast<std::size_t>(vectors.dim)) {
  std::vector<double> vector(static_cast<std::size_t>(dim_));
  for (int i = 0; i < count_; ++i) {
    vectors.read(head, i, vector);
    for (std::size_t c = 0; c < vector.size(); ++c)
      channels_[c * static_cast<std::size_t>(count_) + static_cast<std::size_t>(i)] = vector[c];
  }
}

void VectorProducts::divide(int i, double divisor) {
  for (std::size_t at = static_cast<std::size_t>(i); at < channels_.size(); at += static_cast<std::size_t>(count_))
    channels_[at] /= divisor;
}

void VectorProducts::with(std::span<const double> x, int first, std::span<double> products) const {
  constexpr std::size_t tile = 256;  // whose products fit into the first-level cache
  for (std::size_t begin = 0; begin < products.size(); begin += tile) {
    const std::span<double> some = products.subspan(begin, std::min(tile, products.size() - begin));
    std::ranges::fill(some, 0.0);
    for (std::size_t c = 0; c < x.size(); ++c) {
      const double* channel =
          channels_.data() + c * static_cast<std::size_t>(count_) + static_cast<std::size_t>(first) + begin;
      for (std::size_t i = 0; i < some.size(); ++i) some[i] += x[c] * channel[i];
    }
  }
}

void VectorProducts::read(int i, std::span<double> vector) const {
  for (std::size_t c = 0; c < vector.size(); ++c)
    vector[c] = channels_[c * static_cast<std::size_t>(count_) + static_cast<std::size_t>(i)];
}

}  // namespace kvreplay
