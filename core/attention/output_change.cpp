#include "attention/output_change.h"

#include <cmath>
#include <cstddef>
#include <vector>

#include "parallel.h"
#include "trace/float_types.h"

namespace kvreplay {
namespace {

void of_head(const TensorView& values, int kv_head, std::span<const std::int32_t> positions,
             std::span<const double> weights, std::span<double> distances) {
  const auto dim = static_cast<std::size_t>(values.dim);
  std::vector<double> mean(dim);
  for (std::size_t j = 0; j < positions.size(); ++j) {
    const std::byte* value = values.row(kv_head, positions[j]);
    for (std::size_t c = 0; c < dim; ++c) mean[c] += weights[j] * static_cast<double>(load(value, values.dtype, c));
  }
  for (std::size_t j = 0; j < positions.size(); ++j) {
    const std::byte* value = values.row(kv_head, positions[j]);
    double square = 0;
    for (std::size_t c = 0; c < dim; ++c) {
      const double apart = mean[c] - static_cast<double>(load(value, values.dtype, c));
      square += apart * apart;
    }
    distances[j] = std::sqrt(square);
  }
}

}  // namespace

Matrix distances_from_mean(const TensorView& values, std::span<const std::int32_t> positions, int rows,
                           const Matrix& weights, int threads) {
  Matrix distances(weights.rows(), weights.columns());
  const int group = weights.rows() / values.heads;
  const std::vector<std::exception_ptr> thrown =
      side_by_side(threads, static_cast<std::size_t>(weights.rows()), [&](std::size_t i) {
        const int head = static_cast<int>(i), kv_head = head / group;
        const auto n = static_cast<std::size_t>(weights.columns());
        const std::size_t begin = rows == 1 ? 0 : static_cast<std::size_t>(kv_head) * n;
        of_head(values, kv_head, positions.subspan(begin, n), weights.row(head), distances.row(head));
      });
  for (const std::exception_ptr& one : thrown)
    if (one) std::rethrow_exception(one);
  return distances;
}

}  // namespace kvreplay
