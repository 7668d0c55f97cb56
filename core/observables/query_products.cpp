#include "observables/query_products.h"

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "attention/softmax_keys.h"
#include "float_types.h"
#include "parallel.h"

namespace kvreplay {
namespace {

double product(std::span<const double> a, std::span<const double> b) {
  constexpr std::size_t lanes = 8;  // sums side by side: each waits for the one before
  std::array<double, lanes> sums{};
  std::size_t c = 0;
  for (; c + lanes <= a.size(); c += lanes)
    for (std::size_t lane = 0; lane < lanes; ++lane) sums[lane] += a[c + lane] * b[c + lane];
  for (; c < a.size(); ++c) sums[c % lanes] += a[c] * b[c];
  double sum = 0;
  for (const double of_lane : sums) sum += of_lane;
  return sum;
}

}  // namespace

std::vector<double> products_with(std::span<const double> query, std::span<const double> vectors) {
  std::vector<double> products(vectors.size() / query.size());
  for (std::size_t i = 0; i < products.size(); ++i)
    products[i] = product(query, vectors.subspan(i * query.size(), query.size()));
  return products;
}

Matrix query_products(const LayerTensors& layer, std::int32_t position, int first, int end, int threads) {
  constexpr int block = 512;  // keys of a piece of work
  const int count = std::max(0, end - first), group = layer.group(), stored = stored_query(layer, position);
  const auto dim = static_cast<std::size_t>(layer.q.dim);
  Matrix queries(layer.q.heads, layer.q.dim), products(layer.q.heads, count);
  for (int head = 0; head < layer.q.heads; ++head) read_row(layer.q, head, stored, queries.row(head));
  const int blocks = (count + block - 1) / block;
  all_side_by_side(threads, static_cast<std::size_t>(layer.k.heads * blocks), [&](std::size_t piece) {
    const int kv_head = static_cast<int>(piece) / blocks, begin = static_cast<int>(piece) % blocks * block;
    std::vector<double> key(dim);
    for (int j = begin; j < std::min(begin + block, count); ++j) {
      read_row(layer.k, kv_head, first + j, key);  // once for all query heads of the group
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
        products(head, j) = product(queries.row(head), key);
    }
  });
  return products;
}

}  // namespace kvreplay
