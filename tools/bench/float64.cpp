#include "float64.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

#include "float_types.h"

namespace kvreplay::bench {
namespace {

constexpr int block_rows = 16;
constexpr int block_columns = 64;

std::size_t area(int a, int b) { return static_cast<std::size_t>(a) * static_cast<std::size_t>(b); }

/// Vectors as [blocks, dim, block_columns], zeros past the last, so that the innermost loop runs over neighbours.
class Columns {
 public:
  template <class Load>
  Columns(int count, int dim, Load load) : dim_(dim), blocks_((count + block_columns - 1) / block_columns) {
    numbers_.resize(area(blocks_, dim) * block_columns);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < count; ++i)
      for (int c = 0; c < dim; ++c)
        numbers_[(area(i / block_columns, dim) + static_cast<std::size_t>(c)) * block_columns +
                 static_cast<std::size_t>(i % block_columns)] = load(i, c);
  }

  int blocks() const { return blocks_; }
  int padded() const { return blocks_ * block_columns; }

  /// out[row, column of this block] = <rows[row], column>; rows are [block_rows, dim], `stride` lies between rows of
  /// `out`.
  void multiply(const double* rows, int block, double* out, std::size_t stride) const {
    double sums[block_rows][block_columns] = {};
    const double* column = numbers_.data() + area(block, dim_) * block_columns;
    for (int c = 0; c < dim_; ++c, column += block_columns) {
      for (int row = 0; row < block_rows; ++row) {
        const double factor = rows[area(row, dim_) + static_cast<std::size_t>(c)];
        for (int j = 0; j < block_columns; ++j) sums[row][j] += factor * column[j];
      }
    }
    for (int row = 0; row < block_rows; ++row)
      std::copy_n(sums[row], block_columns, out + static_cast<std::size_t>(row) * stride + area(block, block_columns));
  }

 private:
  int dim_;
  int blocks_;
  std::vector<double> numbers_;
};

/// take(index of a query, its row of attention over `keys`), from several threads.
template <class Take>
void for_each_row(const LayerTensors& layer, int head, std::span<const std::int32_t> queries,
                  std::span<const std::int32_t> keys, Take take) {
  const int dim = layer.k.dim;
  const int kv_head = head / layer.group();
  const Columns columns(static_cast<int>(keys.size()), dim, [&](int i, int c) {
    return static_cast<double>(
        load(layer.k.row(kv_head, keys[static_cast<std::size_t>(i)]), layer.k.dtype, static_cast<std::size_t>(c)));
  });
  const auto stride = static_cast<std::size_t>(columns.padded());
  const int count = static_cast<int>(queries.size());
#pragma omp parallel
  {
    std::vector<double> rows(area(block_rows, dim)), attention(block_rows * stride);
#pragma omp for schedule(dynamic)
    for (int first = 0; first < count; first += block_rows) {
      const int present = std::min(block_rows, count - first);
      for (int row = 0; row < present; ++row) {
        const std::int32_t position = queries[static_cast<std::size_t>(first + row)];
        const auto stored = std::ranges::lower_bound(layer.query_positions, position) - layer.query_positions.begin();
        const std::byte* query = layer.q.row(head, layer.query_positions.empty() ? position : static_cast<int>(stored));
        for (int c = 0; c < dim; ++c)
          rows[area(row, dim) + static_cast<std::size_t>(c)] =
              static_cast<double>(layer.softmax_scale) *
              static_cast<double>(load(query, layer.q.dtype, static_cast<std::size_t>(c)));
      }
      const auto last_seen =
          std::ranges::upper_bound(keys, queries[static_cast<std::size_t>(first + present - 1)]) - keys.begin();
      for (int block = 0; block * block_columns < last_seen; ++block)
        columns.multiply(rows.data(), block, attention.data(), stride);
      for (int row = 0; row < present; ++row) {
        const std::int32_t position = queries[static_cast<std::size_t>(first + row)];
        const std::int32_t lowest = layer.sliding_window > 0 ? position - layer.sliding_window + 1 : 0;
        const auto begin = static_cast<std::size_t>(std::ranges::lower_bound(keys, lowest) - keys.begin());
        const auto end = static_cast<std::size_t>(std::ranges::upper_bound(keys, position) - keys.begin());
        const std::span<double> all(attention.data() + static_cast<std::size_t>(row) * stride, keys.size());
        const std::span<double> seen = all.subspan(begin, end - begin);
        const double cap = static_cast<double>(layer.logit_softcap);
        if (cap > 0)
          for (double& z : seen) z = cap * std::tanh(z / cap);
        const double highest = seen.empty() ? 0.0 : *std::ranges::max_element(seen);
        for (double& z : seen) z = std::exp(z - highest);
        const double sum = std::accumulate(seen.begin(), seen.end(), 0.0);
        for (double& a : seen) a /= sum;
        std::ranges::fill(all.first(begin), 0.0);
        std::ranges::fill(all.subspan(end), 0.0);
        take(first + row, std::span<const double>(all), begin, end);
      }
    }
  }
}

}  // namespace

std::vector<double> attention_column_sums(const LayerTensors& layer, int head, std::span<const std::int32_t> queries,
                                          std::span<const std::int32_t> keys) {
  std::vector<std::vector<double>> of_thread(static_cast<std::size_t>(omp_get_max_threads()),
                                             std::vector<double>(keys.size()));
  for_each_row(layer, head, queries, keys, [&](int, std::span<const double> row, std::size_t begin, std::size_t end) {
    std::vector<double>& sums = of_thread[static_cast<std::size_t>(omp_get_thread_num())];
    for (std::size_t j = begin; j < end; ++j) sums[j] += row[j];
  });
  for (std::size_t thread = 1; thread < of_thread.size(); ++thread)
    for (std::size_t j = 0; j < keys.size(); ++j) of_thread[0][j] += of_thread[thread][j];
  return of_thread[0];
}

std::vector<double> attention_rows(const LayerTensors& layer, int head, std::span<const std::int32_t> queries,
                                   std::span<const std::int32_t> keys) {
  std::vector<double> rows(queries.size() * keys.size());
  for_each_row(layer, head, queries, keys, [&](int query, std::span<const double> row, std::size_t, std::size_t) {
    std::ranges::copy(row, rows.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(query) * keys.size()));
  });
  return rows;
}

std::vector<double> token_vectors(const TensorView& tensor) {
  const int width = tensor.heads * tensor.dim;
  std::vector<double> vectors(area(tensor.tokens, width));
#pragma omp parallel for schedule(static)
  for (int token = 0; token < tensor.tokens; ++token)
    for (int head = 0; head < tensor.heads; ++head)
      for (int c = 0; c < tensor.dim; ++c)
        vectors[area(token, width) + static_cast<std::size_t>(head * tensor.dim + c)] =
            static_cast<double>(load(tensor.row(head, token), tensor.dtype, static_cast<std::size_t>(c)));
  return vectors;
}

std::vector<double> inner_products(std::span<const double> vectors, int dim, std::span<const std::int32_t> rows,
                                   std::span<const std::int32_t> columns) {
  const Columns turned(static_cast<int>(columns.size()), dim, [&](int i, int c) {
    return vectors[area(columns[static_cast<std::size_t>(i)], dim) + static_cast<std::size_t>(c)];
  });
  const auto stride = static_cast<std::size_t>(turned.padded());
  std::vector<double> products(rows.size() * columns.size());
  const int count = static_cast<int>(rows.size());
#pragma omp parallel
  {
    std::vector<double> some(area(block_rows, dim)), out(block_rows * stride);
#pragma omp for schedule(dynamic)
    for (int first = 0; first < count; first += block_rows) {
      const int present = std::min(block_rows, count - first);
      for (int row = 0; row < present; ++row)
        std::copy_n(
            vectors.begin() + static_cast<std::ptrdiff_t>(area(rows[static_cast<std::size_t>(first + row)], dim)), dim,
            some.begin() + static_cast<std::ptrdiff_t>(area(row, dim)));
      for (int block = 0; block < turned.blocks(); ++block) turned.multiply(some.data(), block, out.data(), stride);
      for (int row = 0; row < present; ++row)
        std::copy_n(
            out.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(row) * stride), columns.size(),
            products.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(first + row) * columns.size()));
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
      const std::int32_t* row = similarity.data() + area(rows[i], n);
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
