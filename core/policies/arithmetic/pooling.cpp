#include "policies/arithmetic/pooling.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "policies/arithmetic/wide_sum.h"

namespace kvreplay {
namespace {

constexpr Choice<Pool> words[] = {{"none", Pool::none}, {"max", Pool::max}, {"avg", Pool::average}};

/// Whole rows at a time are compared or added, one neighbour after another: what vector units are made for.
void raise(std::span<double> to, std::span<const double> other) {
  for (std::size_t j = 0; j < to.size(); ++j) to[j] = std::max(to[j], other[j]);
}
void add(std::span<double> to, std::span<double> dropped, std::span<const double> other) {
  for (std::size_t j = 0; j < to.size(); ++j) add_keeping(to[j], dropped[j], other[j]);
}

/// row[j] = max of row[j - reach .. j + reach]. Maxima of 1, 2, 4 ... scores make those of any width, so the time grows
/// with the logarithm of the kernel.
void pool_maxima(std::span<double> row, std::size_t reach) {
  // from[reach + j] = max of `width` scores from j on; what is outside the row is never the largest.
  std::vector<double> from(row.size() + 2 * reach, -std::numeric_limits<double>::infinity());
  std::ranges::copy(row, from.begin() + static_cast<std::ptrdiff_t>(reach));
  const std::span<double> all(from);
  const std::size_t kernel = 2 * reach + 1;
  std::size_t width = 1;
  for (; 2 * width <= kernel; width *= 2) raise(all.first(all.size() - width), all.subspan(width));
  std::ranges::copy(all.first(row.size()), row.begin());
  raise(row, all.subspan(kernel - width, row.size()));
}

/// row[j] = sum of row[j - reach .. j + reach] / kernel, each added by itself: a sliding sum would be faster for wide
/// kernels, but equal neighbours would have unequal sums here and there, and the ties between them another order.
void pool_averages(std::span<double> row, std::size_t reach, int kernel) {
  const std::vector<double> before(row.begin(), row.end());
  const std::span<const double> from(before);
  std::vector<double> of_sums(row.size());
  const std::span<double> dropped(of_sums);
  std::ranges::fill(row, 0.0);
  for (std::size_t back = reach; back > 0; --back)
    add(row.subspan(back), dropped.subspan(back), from.first(from.size() - back));
  for (std::size_t ahead = 0; ahead <= reach; ++ahead) add(row.first(row.size() - ahead), dropped, from.subspan(ahead));
  for (std::size_t j = 0; j < row.size(); ++j) row[j] = rounded_sum(row[j], dropped[j]) / kernel;
}

}  // namespace

Candidates candidates_of(int tokens, const Scoring& how) { return {how.sinks, tokens - how.sinks - how.recent}; }

Matrix pooled(Matrix scores, Pool pool, int kernel, Candidates candidates) {
  if (pool == Pool::none || kernel == 1) return scores;
  if (candidates.count < 1) return scores;
  const auto reach =
      static_cast<std::size_t>(std::min(kernel / 2, candidates.count - 1));  // further on there is no neighbour
  for (int r = 0; r < scores.rows(); ++r) {
    const std::span<double> row = candidates.of(scores.row(r));
    if (pool == Pool::max)
      pool_maxima(row, reach);
    else
      pool_averages(row, reach, kernel);
  }
  return scores;
}

void add_pooling(Parameters& p, Pool& pool, int& kernel) {
  p.add("kernel", kernel, IntRange{.least = 1, .odd = true}, "width of the pooling window, in tokens");
  p.add<Pool>("pool", pool, words, "pooling operation: none, maximum or average");
}

}  // namespace kvreplay
