#include "observables/query_products.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <vector>

#include "attention/softmax_keys.h"
#include "cpu/combination_kernels.h"
#include "cpu/elementary_kernels.h"
#include "float_types.h"
#include "parallel.h"

namespace kvreplay {

void count_equal(std::span<const double> numbers, std::span<const double> rows, std::span<double> counts) {
  const ElementaryKernels& kernels = elementary_kernels();
  for (std::size_t i = 0; i < counts.size(); ++i)
    counts[i] = kernels.count_equal(numbers.data(), rows.data() + i * numbers.size(), std::ssize(numbers));
}

std::vector<double> products_with(std::span<const double> query, std::span<const double> vectors) {
  const CombinationKernels& kernels = combination_kernels();
  std::vector<double> products(vectors.size() / query.size());
  kernels.inner_products(query.data(), vectors.data(), static_cast<int>(products.size()),
                         static_cast<int>(query.size()), products.data());
  return products;
}

Matrix query_products(const LayerTensors& layer, std::int32_t position, int first, int end, int threads) {
  constexpr int block = 512;        // keys of a piece of work
  constexpr int keys_at_once = 32;  // which a first-level cache holds for the heads of the group
  const CombinationKernels& kernels = combination_kernels();
  const int count = std::max(0, end - first), group = layer.group(), stored = stored_query(layer, position);
  const auto dim = static_cast<std::size_t>(layer.q.dim);
  Matrix queries(layer.q.heads, layer.q.dim), products(layer.q.heads, count);
  for (int head = 0; head < layer.q.heads; ++head) read_row(layer.q, head, stored, queries.row(head));
  const int blocks = (count + block - 1) / block;
  all_side_by_side(threads, static_cast<std::size_t>(layer.k.heads * blocks), [&](std::size_t piece) {
    const int kv_head = static_cast<int>(piece) / blocks, begin = static_cast<int>(piece) % blocks * block;
    std::vector<double> of_keys(keys_at_once * dim);
    for (int key = begin, end_key = std::min(begin + block, count); key < end_key; key += keys_at_once) {
      const int keys = std::min(keys_at_once, end_key - key);
      for (int j = 0; j < keys; ++j)
        read_row(layer.k, kv_head, first + key + j, std::span(of_keys).subspan(static_cast<std::size_t>(j) * dim, dim));
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
        kernels.inner_products(queries.row(head).data(), of_keys.data(), keys, layer.q.dim, &products(head, key));
    }
  });
  return products;
}

}  // namespace kvreplay
