#include "observables/product_codes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "cpu/combination_kernels.h"
#include "parallel.h"
#include "random.h"

namespace kvreplay {
namespace {

double squared_distance(const double* a, const double* b, std::size_t dim) {
  double sum = 0;
  for (std::size_t c = 0; c < dim; ++c) sum += (a[c] - b[c]) * (a[c] - b[c]);
  return sum;
}

/// Of vectors [dim], the first of the nearest centres [count, dim].
class NearestCentre {
 public:
  NearestCentre(std::span<const double> centres, std::size_t dim)
      : dim_(dim), count_(centres.size() / dim), channels_(centres.size()) {
    for (std::size_t i = 0; i < centres.size(); ++i) channels_[i % dim * count_ + i / dim] = centres[i];
  }

  std::size_t operator()(const double* vector) const {
    const auto count = static_cast<int>(count_);
    return static_cast<std::size_t>(
        kernels_.nearest_column(vector, static_cast<int>(dim_), channels_.data(), count, count));
  }

 private:
  const CombinationKernels& kernels_ = combination_kernels();
  std::size_t dim_, count_;
  std::vector<double> channels_;  // [dim, count]: distances of neighbouring centres are computed together
};

/// One part of the vectors of one head.
class Clustering {
 public:
  Clustering(const Vectors& vectors, const ProductQuantiser& how, int row, std::span<double> centres,
             std::span<double> codes)
      : how_(how),
        head_(row / how.parts),
        part_(row % how.parts),
        count_(codes.size()),
        dim_(static_cast<std::size_t>(vectors.dim / how.parts)),
        centres_(centres),
        codes_(codes),
        numbers_(count_ * dim_) {
    std::vector<double> vector(static_cast<std::size_t>(vectors.dim));
    for (std::size_t i = 0; i < count_; ++i) {
      vectors.read(head_, static_cast<int>(i), vector);
      std::copy_n(vector.data() + static_cast<std::size_t>(part_) * dim_, dim_, numbers_.data() + i * dim_);
    }
    begin();
  }

  /// Returns whether the centres have hardly moved.
  bool iterate(int iteration) {
    const std::size_t centre_count = centres_.size() / dim_;
    std::vector<double> sums(centres_.size());
    std::vector<int> members(centre_count);
    const NearestCentre nearest(centres_, dim_);
    for (std::size_t i = 0; i < count_; ++i) {
      const std::size_t centre = nearest(numbers_.data() + i * dim_);
      codes_[i] = static_cast<double>(centre);
      ++members[centre];
      for (std::size_t c = 0; c < dim_; ++c) sums[centre * dim_ + c] += numbers_[i * dim_ + c];
    }
    double moved = 0;
    for (std::size_t centre = 0; centre < centre_count; ++centre) {
      double* const mean = sums.data() + centre * dim_;
      for (std::size_t c = 0; c < dim_; ++c) mean[c] /= std::max(1, members[centre]);
      if (members[centre] == 0)
        std::copy_n(numbers_.data() + chain(how_.seed, how_.layer, head_, part_, centre, iteration) % count_ * dim_,
                    dim_, mean);
      moved += std::sqrt(squared_distance(mean, centres_.data() + centre * dim_, dim_));
    }
    std::ranges::copy(sums, centres_.begin());
    return moved * moved < 1e-4;
  }

 private:
  void begin() {
    std::vector<std::pair<std::uint64_t, std::size_t>> order;
    for (std::size_t i = 0; i < count_; ++i) order.emplace_back(chain(how_.seed, how_.layer, head_, part_, i), i);
    const std::size_t centre_count = centres_.size() / dim_;
    std::ranges::partial_sort(order, order.begin() + static_cast<std::ptrdiff_t>(centre_count));
    for (std::size_t centre = 0; centre < centre_count; ++centre)
      std::copy_n(numbers_.data() + order[centre].second * dim_, dim_, centres_.data() + centre * dim_);
  }

  const ProductQuantiser& how_;
  int head_, part_;
  std::size_t count_, dim_;
  std::span<double> centres_;
  std::span<double> codes_;
  std::vector<double> numbers_;
};

}  // namespace

Matrix product_codes(const Vectors& vectors, const ProductQuantiser& how, int threads) {
  const int numbers = how.centres(vectors.count) * (vectors.dim / how.parts);
  Matrix made(vectors.heads * how.parts, numbers + vectors.count);
  if (vectors.count == 0) return made;
  std::vector<Clustering> all;
  for (int row = 0; row < made.rows(); ++row)
    all.emplace_back(vectors, how, row, made.row(row).first(static_cast<std::size_t>(numbers)),
                     made.row(row).subspan(static_cast<std::size_t>(numbers)));
  std::vector<char> settled(all.size());
  for (int iteration = 0; iteration < how.iterations; ++iteration) {
    all_side_by_side(threads, all.size(), [&](std::size_t i) { settled[i] = all[i].iterate(iteration) ? 1 : 0; });
    if (std::ranges::find(settled, 0) == settled.end()) break;
  }
  return made;
}

}  // namespace kvreplay
