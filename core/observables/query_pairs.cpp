#include "observables/query_pairs.h"

#include <cmath>
#include <span>
#include <vector>

#include "attention/rope.h"
#include "attention/softmax_keys.h"
#include "float_types.h"
#include "parallel.h"

namespace kvreplay {

PairPlace pair_place(const Rope& rope, std::size_t pair) {
  const auto offset = static_cast<std::size_t>(rope.offset);
  if (rope.interleaved) return {offset + 2 * pair, offset + 2 * pair + 1};
  return {offset + pair, offset + pair + rope.inv_freq.size()};
}

Matrix query_pair_means(const LayerTensors& layer, int tokens, int threads) {
  const std::size_t pairs = layer.rope.inv_freq.size();
  const BackwardRotation backward(layer.rope, tokens);
  Matrix means(layer.q.heads, 3 * static_cast<int>(pairs));
  all_side_by_side(threads, static_cast<std::size_t>(layer.q.heads), [&](std::size_t head) {
    const std::span<double> sums = means.row(static_cast<int>(head));
    std::vector<double> query(static_cast<std::size_t>(layer.q.dim));
    for (int t = 0; t < tokens; ++t) {
      read_row(layer.q, static_cast<int>(head), stored_query(layer, t), query);
      backward.apply(-t, query);
      for (std::size_t i = 0; i < pairs; ++i) {
        const auto [real, imaginary] = pair_place(layer.rope, i);
        const double x = query[real], y = query[imaginary];
        sums[i] += x;
        sums[pairs + i] += y;
        sums[2 * pairs + i] += std::sqrt(x * x + y * y);  // squares of float32 numbers do not overflow
      }
    }
    for (double& sum : sums) sum /= tokens * layer.rope.attention_scaling;
  });
  return means;
}

}  // namespace kvreplay
