#include "observables/principal_direction.h"

#include <Eigen/Eigenvalues>
#include <algorithm>

#include "attention/softmax_keys.h"
#include "float_types.h"
#include "observables/vector_statistics.h"
#include "parallel.h"

namespace kvreplay {
namespace {

/// [d]: of the queries of one head and their sum of q q'.
std::vector<double> direction_of(const Vectors& queries, int head, std::span<const double> products) {
  std::vector<double> direction = first_eigenvector(products, queries.dim);
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

std::vector<double> first_eigenvector(std::span<const double> matrix, int dim) {
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(
      Eigen::Map<const Eigen::MatrixXd>(matrix.data(), dim, dim));
  Eigen::Index greatest = 0;  // the first of equal ones
  solver.eigenvalues().maxCoeff(&greatest);
  const Eigen::VectorXd vector = solver.eigenvectors().col(greatest);
  return {vector.begin(), vector.end()};
}

}  // namespace kvreplay
