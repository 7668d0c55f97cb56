#include "observables/principal_direction.h"

#include <algorithm>
#include <cmath>

#include "attention/softmax_keys.h"
#include "float_types.h"
#include "observables/vector_statistics.h"
#include "parallel.h"

namespace kvreplay {
namespace {

/// [d]: of the queries of one head and their sum of q q'.
std::vector<double> direction_of(const Vectors& queries, int head, std::span<const double> products) {
  std::vector<double> direction = first_eigenvector({products.begin(), products.end()}, queries.dim);
  std::vector<double> sum(direction.size()), query(direction.size());
  for (int i = 0; i < queries.count; ++i) {
    queries.read(head, i, query);
    for (std::size_t c = 0; c < query.size(); ++c) sum[c] += query[c];
  }
  double projection = 0;
  for (std::size_t c = 0; c < sum.size(); ++c) projection += sum[c] * direction[c];
  if (projection < 0)
    for (double& x : direction) x = -x;
  return direction;
}

}  // namespace

Matrix principal_directions(const LayerTensors& layer, std::span<const std::int32_t> positions, int threads) {
  std::vector<int> stored;
  for (const std::int32_t position : positions) stored.push_back(stored_query(layer, position));
  const Vectors queries{layer.q.heads, static_cast<int>(stored.size()), layer.q.dim,
                        [&](int head, int i, std::span<double> query) {
                          read_row(layer.q, head, stored[static_cast<std::size_t>(i)], query);
                        }};
  const Matrix products = product_sums(queries, {}, {}, threads);
  Matrix directions(layer.q.heads, layer.q.dim);
  all_side_by_side(threads, static_cast<std::size_t>(layer.q.heads), [&](std::size_t number) {
    const auto head = static_cast<int>(number);
    std::ranges::copy(direction_of(queries, head, products.row(head)), directions.row(head).begin());
  });
  return directions;
}

std::vector<double> first_eigenvector(std::vector<double> matrix, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  std::vector<double> vectors(d * d);  // rows
  for (std::size_t i = 0; i < d; ++i) vectors[i * d + i] = 1;
  double size = 0;
  for (const double x : matrix) size += x * x;
  constexpr int most_sweeps = 64;  // the entries off the diagonal shrink quadratically: some ten are enough
  for (int sweep = 0; sweep < most_sweeps; ++sweep) {
    double off = 0;
    for (std::size_t p = 0; p < d; ++p)
      for (std::size_t q = p + 1; q < d; ++q) off += matrix[p * d + q] * matrix[p * d + q];
    if (off <= 1e-32 * size) break;
    for (std::size_t p = 0; p < d; ++p)
      for (std::size_t q = p + 1; q < d; ++q) {
        const double apq = matrix[p * d + q];
        if (apq == 0) continue;
        const double tau = (matrix[q * d + q] - matrix[p * d + p]) / (2 * apq);
        const double tangent = std::copysign(1.0, tau) / (std::abs(tau) + std::hypot(1.0, tau));
        const double cosine = 1 / std::hypot(1.0, tangent), sine = tangent * cosine;
        for (std::size_t i = 0; i < d; ++i) {
          const double x = matrix[i * d + p], y = matrix[i * d + q];
          matrix[i * d + p] = cosine * x - sine * y;
          matrix[i * d + q] = sine * x + cosine * y;
        }
        const auto turn = [&](std::vector<double>& rows) {
          for (std::size_t i = 0; i < d; ++i) {
            const double x = rows[p * d + i], y = rows[q * d + i];
            rows[p * d + i] = cosine * x - sine * y;
            rows[q * d + i] = sine * x + cosine * y;
          }
        };
        turn(matrix);
        turn(vectors);
      }
  }
  std::size_t best = 0;
  for (std::size_t i = 1; i < d; ++i)
    if (matrix[i * d + i] > matrix[best * d + best]) best = i;
  const auto begin = vectors.begin() + static_cast<std::ptrdiff_t>(best * d);
  return {begin, begin + dim};
}

}  // namespace kvreplay
