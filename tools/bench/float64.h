// Attention in float64 by plain loops: what every answer is held against.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tensor.h"

namespace kvreplay::bench {

/// [keys]: attention of query head `head` at `queries` (positions) over `keys` (positions, ascending), each query over
/// those that it sees, summed over the queries.
std::vector<double> attention_column_sums(const LayerTensors& layer, int head, std::span<const std::int32_t> queries,
                                          std::span<const std::int32_t> keys);

/// [queries, keys]: the same, row by row.
std::vector<double> attention_rows(const LayerTensors& layer, int head, std::span<const std::int32_t> queries,
                                   std::span<const std::int32_t> keys);

/// [tokens, heads * dim]: row i is the vectors of all heads at token i, side by side.
std::vector<double> token_vectors(const TensorView& tensor);

/// [rows, columns] products of the vectors `rows` and `columns` of [n, dim].
std::vector<double> inner_products(std::span<const double> vectors, int dim, std::span<const std::int32_t> rows,
                                   std::span<const std::int32_t> columns);

/// Adds to sums[j] the sum over rows i of max(0, similarity[i, j] - floor_i), and raises highest[j] to the highest
/// similarity[i, j]; similarity is [n, n], `rows` are row numbers.
void add_above_floors(std::span<const std::int32_t> similarity, int n, std::span<const std::int32_t> rows,
                      std::span<const std::int32_t> floors, std::span<std::int64_t> sums,
                      std::span<std::int64_t> highest);

}  // namespace kvreplay::bench
