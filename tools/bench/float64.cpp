#include "float64.h"

#include <cblas.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <numeric>
#include <ranges>

#include "float_types.h"

namespace kvreplay::bench {
namespace {

constexpr std::size_t queries_at_once = 128;

/// [rows of a, rows of b].
Matrix inner_products(const Matrix& a, const Matrix& b) {
  Matrix products(a.rows(), b.rows());
  openblas_set_num_threads(omp_get_num_procs());
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, a.rows(), b.rows(), a.columns(), 1.0, a.values().data(),
              a.columns(), b.values().data(), b.columns(), 0.0, products.values().data(), b.rows());
  return products;
}

}  // namespace

Matrix vectors_of(const TensorView& tensor, int head, std::span<const std::int32_t> rows) {
  Matrix vectors(static_cast<int>(rows.size()), tensor.dim);
#pragma omp parallel for schedule(static)
  for (int i = 0; i < vectors.rows(); ++i) read_row(tensor, head, rows[static_cast<std::size_t>(i)], vectors.row(i));
  return vectors;
}

Matrix logits_of(const LayerTensors& layer, int head, std::span<const std::int32_t> queries,
                 std::span<const std::int32_t> keys) {
  std::vector<std::int32_t> stored(queries.begin(), queries.end());
  const std::span<const std::int32_t> positions = layer.query_positions;
  if (!positions.empty())
    for (std::int32_t& row : stored)
      row = static_cast<std::int32_t>(std::ranges::lower_bound(positions, row) - positions.begin());
  Matrix logits = inner_products(vectors_of(layer.q, head, stored), vectors_of(layer.k, head / layer.group(), keys));
  for (double& logit : logits.values()) logit *= static_cast<double>(layer.softmax_scale);
  return logits;
}

Matrix attention_rows(const LayerTensors& layer, int head, std::span<const std::int32_t> queries,
                      std::span<const std::int32_t> keys) {
  Matrix attention = logits_of(layer, head, queries, keys);
#pragma omp parallel for schedule(dynamic)
  for (int i = 0; i < attention.rows(); ++i) {
    const auto seen_keys = std::ranges::upper_bound(keys, queries[static_cast<std::size_t>(i)]) - keys.begin();
    const std::span<double> row = attention.row(i), seen = row.first(static_cast<std::size_t>(seen_keys));
    const double highest = seen.empty() ? 0.0 : *std::ranges::max_element(seen);
    for (double& z : seen) z = std::exp(z - highest);
    const double sum = std::accumulate(seen.begin(), seen.end(), 0.0);
    for (double& a : seen) a /= sum;
    std::ranges::fill(row.subspan(seen.size()), 0.0);
  }
  return attention;
}

std::vector<double> attention_column_sums(const LayerTensors& layer, int head, std::span<const std::int32_t> queries,
                                          std::span<const std::int32_t> keys) {
  std::vector<double> sums(keys.size());
  for (std::size_t first = 0; first < queries.size(); first += queries_at_once) {
    const auto some = queries.subspan(first, std::min(queries_at_once, queries.size() - first));
    const auto seen_keys = std::ranges::upper_bound(keys, some.back()) - keys.begin();
    const Matrix rows = attention_rows(layer, head, some, keys.first(static_cast<std::size_t>(seen_keys)));
    for (int i = 0; i < rows.rows(); ++i)
      std::ranges::transform(sums | std::views::take(seen_keys), rows.row(i), sums.begin(), std::plus<>());
  }
  return sums;
}

Matrix cosines(const TensorView& tensor, int step) {
  const auto dim = static_cast<std::size_t>(tensor.dim);
  Matrix vectors(tensor.tokens, tensor.heads * tensor.dim);
  Matrix some((tensor.tokens + step - 1) / step, vectors.columns());
  std::vector<double> norms;
  for (int token = 0; token < tensor.tokens; ++token) {
    const std::span<double> vector = vectors.row(token);
    for (int head = 0; head < tensor.heads; ++head)
      read_row(tensor, head, token, vector.subspan(static_cast<std::size_t>(head) * dim, dim));
    norms.push_back(std::sqrt(std::inner_product(vector.begin(), vector.end(), vector.begin(), 0.0)));
    if (token % step == 0) std::ranges::copy(vector, some.row(token / step).begin());
  }
  Matrix products = inner_products(some, vectors);
#pragma omp parallel for schedule(static)
  for (int i = 0; i < products.rows(); ++i) {
    for (int j = 0; j < products.columns(); ++j) {
      const double both = norms[static_cast<std::size_t>(i * step)] * norms[static_cast<std::size_t>(j)];
      products(i, j) = both > 0 ? std::clamp(products(i, j) / both, -1.0, 1.0) : 0.0;
    }
  }
  return products;
}

void add_above_floors(std::span<const std::int32_t> similarity, int n, std::span<const std::int32_t> rows,
                      std::span<const std::int32_t> floors, std::span<std::int64_t> sums,
                      std::span<std::int64_t> highest) {
  constexpr int columns_at_once = 1024;
#pragma omp parallel for schedule(static)
  for (int first = 0; first < n; first += columns_at_once) {
    const int end = std::min(n, first + columns_at_once);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::int32_t* row = similarity.data() + static_cast<std::size_t>(rows[i]) * static_cast<std::size_t>(n);
      const std::int64_t floor = floors[i];
      std::int64_t* sum = sums.data();
      std::int64_t* high = highest.data();
      for (int j = first; j < end; ++j) {
        const std::int64_t value = row[j];
        sum[j] += std::max<std::int64_t>(0, value - floor);
        high[j] = std::max(high[j], value);
      }
    }
  }
}

}  // namespace kvreplay::bench
