#include "observables/page_bounds.h"

#include <algorithm>
#include <array>
#include <limits>

#include "float_types.h"
#include "parallel.h"

namespace kvreplay {

Matrix page_bounds(const TensorView& keys, int tokens, int page, int threads) {
  const int pages = (tokens + page - 1) / page;
  const auto dim = static_cast<std::size_t>(keys.dim);
  Matrix bounds(keys.heads, pages * 2 * keys.dim, std::numeric_limits<double>::infinity());
  all_side_by_side(threads, static_cast<std::size_t>(keys.heads), [&](std::size_t head) {
    for (int token = 0; token < tokens; ++token) {
      const std::byte* key = keys.row(static_cast<int>(head), token);
      const std::span<double> of_page =
          bounds.row(static_cast<int>(head)).subspan(static_cast<std::size_t>(token / page) * 2 * dim, 2 * dim);
      const bool first = token % page == 0;
      for (std::size_t c = 0; c < dim; ++c) {
        const double x = load(key, keys.dtype, c);
        of_page[c] = first ? x : std::min(of_page[c], x);
        of_page[dim + c] = first ? x : std::max(of_page[dim + c], x);
      }
    }
  });
  return bounds;
}

Matrix page_means(const Vectors& vectors, int page, int threads) {
  const int pages = (vectors.count + page - 1) / page;
  const auto dim = static_cast<std::size_t>(vectors.dim);
  Matrix means(vectors.heads, pages * vectors.dim);
  all_side_by_side(threads, static_cast<std::size_t>(vectors.heads), [&](std::size_t head) {
    std::vector<double> vector(dim);
    for (int i = 0; i < vectors.count; ++i) {
      vectors.read(static_cast<int>(head), i, vector);
      const int first = i / page * page, size = std::min(page, vectors.count - first);
      const std::span<double> mean =
          means.row(static_cast<int>(head)).subspan(static_cast<std::size_t>(i / page) * dim, dim);
      for (std::size_t c = 0; c < dim; ++c) mean[c] += vector[c];
      if (i == first + size - 1)
        for (double& number : mean) number /= size;
    }
  });
  return means;
}

std::vector<double> page_scores(std::span<const double> query, std::span<const double> bounds) {
  const std::size_t dim = query.size();
  std::vector<double> scores(bounds.size() / (2 * dim));
  constexpr std::size_t lanes = 8;  // sums side by side: each waits for the one before
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const double* least = bounds.data() + i * 2 * dim;
    const double* most = least + dim;
    std::array<double, lanes> sums{};
    std::size_t c = 0;
    for (; c + lanes <= dim; c += lanes)
      for (std::size_t lane = 0; lane < lanes; ++lane)
        sums[lane] += std::max(query[c + lane] * least[c + lane], query[c + lane] * most[c + lane]);
    for (; c < dim; ++c) sums[c % lanes] += std::max(query[c] * least[c], query[c] * most[c]);
    for (const double sum : sums) scores[i] += sum;
  }
  return scores;
}

}  // namespace kvreplay
