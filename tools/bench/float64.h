// Attention and cosines in float64, products by OpenBLAS: what every answer is held against.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "matrix.h"
#include "tensor.h"

namespace kvreplay::bench {

/// [rows, dim]: these rows of a head.
Matrix vectors_of(const TensorView& tensor, int head, std::span<const std::int32_t> rows);

/// [queries, keys] scaled products of query head `head` at `queries` (positions) with `keys` (positions), seen or not.
/// The layer has neither a sliding window nor a soft cap.
Matrix logits_of(const LayerTensors& layer, int head, std::span<const std::int32_t> queries,
                 std::span<const std::int32_t> keys);

/// [queries, keys]: the attention of each query over those of `keys` (ascending) that it sees.
Matrix attention_rows(const LayerTensors& layer, int head, std::span<const std::int32_t> queries,
                      std::span<const std::int32_t> keys);

/// [keys]: the same, summed over the queries.
std::vector<double> attention_column_sums(const LayerTensors& layer, int head, std::span<const std::int32_t> queries,
                                          std::span<const std::int32_t> keys);

/// Cosines of tokens 0, step, 2 * step, ... with all tokens; the vector of a token is those of all heads, side by side.
/// That of zeros has none with any.
Matrix cosines(const TensorView& tensor, int step = 1);

/// Adds to sums[j] the sum over rows i of max(0, similarity[i, j] - floor_i), and raises highest[j] to the highest
/// similarity[i, j]; similarity is [n, n], `rows` are row numbers.
void add_above_floors(std::span<const std::int32_t> similarity, int n, std::span<const std::int32_t> rows,
                      std::span<const std::int32_t> floors, std::span<std::int64_t> sums,
                      std::span<std::int64_t> highest);

}  // namespace kvreplay::bench
