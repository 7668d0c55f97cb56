#include "observables/vector_products.h"

#include <algorithm>
#include <cstddef>

namespace kvreplay {

VectorProducts::VectorProducts(const Vectors& vectors, int head)
    : count_(vectors.count), dim_(vectors.dim), kernels_(combination_kernels()) {
  const std::size_t panels = (static_cast<std::size_t>(count_) + panel - 1) / panel;
  channels_.resize(panels * panel * static_cast<std::size_t>(dim_));
  std::vector<double> vector(static_cast<std::size_t>(dim_));
  for (int i = 0; i < count_; ++i) {
    vectors.read(head, i, vector);
    double* const channels = channels_.data() + place(i);
    for (std::size_t c = 0; c < vector.size(); ++c) channels[c * panel] = vector[c];
  }
}

std::size_t VectorProducts::place(int i) const {
  const auto at = static_cast<std::size_t>(i);
  return at / panel * panel * static_cast<std::size_t>(dim_) + at % panel;
}

void VectorProducts::with(std::span<const double> x, int first, std::span<double> products) const {
  with_each(x, first, products);
}

void VectorProducts::with_each(std::span<const double> xs, int first, std::span<double> products) const {
  constexpr int width = static_cast<int>(panel);
  const int lists = static_cast<int>(xs.size()) / dim_, n = static_cast<int>(products.size()) / lists;
  for (int i = 0, end = 0; i < n; i = end) {
    end = std::min(n, i + width - (first + i) % width);
    kernels_.lists_of_doubles(xs.data(), lists, dim_, channels_.data() + place(first + i), width, end - i,
                              products.data() + i, n);
  }
}

void VectorProducts::read(int i, std::span<double> vector) const {
  const double* const channels = channels_.data() + place(i);
  for (std::size_t c = 0; c < vector.size(); ++c) vector[c] = channels[c * panel];
}

void add_to_each(double factor, std::span<const double> vector, std::span<double* const> others) {
  combination_kernels().add_to_each(factor, vector.data(), static_cast<int>(vector.size()), others.data(),
                                    static_cast<int>(others.size()));
}

}  // namespace kvreplay
