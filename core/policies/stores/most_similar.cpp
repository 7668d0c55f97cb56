#include "policies/stores/most_similar.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

#include "float_types.h"
#include "observables/vector_products.h"

namespace kvreplay {

std::vector<SimilarToken> most_similar(const TensorView& keys, int head, std::span<const std::int32_t> some,
                                       std::span<const std::int32_t> others) {
  const auto read = [&](std::int32_t token, std::span<double> key) { read_row(keys, head, token, key); };
  const VectorProducts products(
      {1, static_cast<int>(others.size()), keys.dim,
       [&](int, int i, std::span<double> key) { read(others[static_cast<std::size_t>(i)], key); }},
      0);
  std::vector<double> key(static_cast<std::size_t>(keys.dim));
  const auto square = [&](std::int32_t token) {
    read(token, key);
    return std::max(std::inner_product(key.begin(), key.end(), key.begin(), 0.0), least_length * least_length);
  };
  std::vector<double> squares(others.size());
  std::ranges::transform(others, squares.begin(), square);
  // Signed squares of the cosines, as one quotient: equal cosines of whole numbers have equal bits.
  std::vector<SimilarToken> found(some.size(), {.cosine = -std::numeric_limits<double>::infinity()});
  constexpr std::size_t block = 64;  // keys that the processor's cache holds for all tokens
  double along[block];
  for (std::size_t first = 0; first < others.size(); first += block) {
    const std::size_t count = std::min(block, others.size() - first);
    for (std::size_t e = 0; e < some.size(); ++e) {
      const double own = square(some[e]);
      products.with(key, static_cast<int>(first), std::span(along).first(count));
      for (std::size_t i = 0; i < count; ++i) {
        const double cosine = std::copysign(along[i] * along[i] / (own * squares[first + i]), along[i]);
        if (cosine > found[e].cosine) found[e] = {others[first + i], cosine};
      }
    }
  }
  for (SimilarToken& one : found) one.cosine = std::copysign(std::sqrt(std::abs(one.cosine)), one.cosine);
  return found;
}

}  // namespace kvreplay
