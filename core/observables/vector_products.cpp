#include "observables/vector_products.h"

#include <algorithm>
#include <cstddef>

namespace kvreplay {

VectorProducts::VectorProducts(const Vectors& vectors, int head)
    : count_(vectors.count),
      dim_(vectors.dim),
      kernels_(combination_kernels()),
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
  with_each(x, first, products);
}

void VectorProducts::with_each(std::span<const double> xs, int first, std::span<double> products) const {
  constexpr int block = 512;  // vectors that a core's L2 cache holds for all lists
  const int lists = static_cast<int>(xs.size()) / dim_, n = static_cast<int>(products.size()) / lists;
  for (int begin = 0; begin < n; begin += block)
    kernels_.lists_of_doubles(xs.data(), lists, dim_, channels_.data() + first + begin, count_,
                              std::min(block, n - begin), products.data() + begin, n);
}

void VectorProducts::read(int i, std::span<double> vector) const {
  for (std::size_t c = 0; c < vector.size(); ++c)
    vector[c] = channels_[c * static_cast<std::size_t>(count_) + static_cast<std::size_t>(i)];
}

}  // namespace kvreplay
