// Products of one query with many keys, and equal codes of both, for policies that rank keys query by query.
//
// Host code: O(n d) for a query and head.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/softmax_keys.h"  // stored_query and read_row, which policies use with these products
#include "float_types.h"
#include "matrix.h"
#include "tensor.h"

namespace kvreplay {

/// [Hq, end - first]: <q, k_j> of the query at `position` with the stored keys first <= j < end, in float64. Throws
/// Error{input} if the query is not stored.
Matrix query_products(const LayerTensors& layer, std::int32_t position, int first, int end, int threads);

/// [rows]: how many numbers of each row equal the one in their place; rows follow each other, each as long as these.
void count_equal(std::span<const double> numbers, std::span<const double> rows, std::span<double> counts);

/// <q, x_i> of vectors that follow each other, each as long as the query.
std::vector<double> products_with(std::span<const double> query, std::span<const double> vectors);

}  // namespace kvreplay
