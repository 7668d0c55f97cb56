#include "policies/parts/pooling.h"

#include <algorithm>
#include <vector>

namespace kvreplay {
namespace {

constexpr Choice<Pool> words[] = {{"none", Pool::none}, {"max", Pool::max}, {"avg", Pool::average}};

double largest(std::span<const double> neighbours) { return *std::ranges::max_element(neighbours); }

double sum(std::span<const double> neighbours) {
  double total = 0;
  for (const double value : neighbours) total += value;
  return total;
}

}  // namespace

Matrix pooled(Matrix scores, Pool pool, int kernel, int columns) {
  if (pool == Pool::none || kernel == 1) return scores;
  const int reach = kernel / 2;
  std::vector<double> before(static_cast<std::size_t>(columns));
  for (int r = 0; r < scores.rows(); ++r) {
    const std::span<double> row = scores.row(r).first(before.size());
    std::ranges::copy(row, before.begin());
    for (int j = 0; j < columns; ++j) {
      const auto begin = static_cast<std::size_t>(std::max(0, j - reach));
      const auto end = static_cast<std::size_t>(std::min(columns - 1, j + reach)) + 1;
      const std::span<const double> neighbours = std::span(before).subspan(begin, end - begin);
      row[static_cast<std::size_t>(j)] = pool == Pool::max ? largest(neighbours) : sum(neighbours) / kernel;
    }
  }
  return scores;
}

void add_pooling(Parameters& p, Pool& pool, int& kernel) {
  p.add("kernel", kernel, IntRange{.least = 1, .odd = true}, "tokens pooled around each one");
  p.add<Pool>("pool", pool, words, "what pooling takes of the neighbours");
}

}  // namespace kvreplay
