#include "policies/scores/block_attention.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/softmax_keys.h"
#include "positions.h"

namespace kvreplay {
namespace {

/// Copies the rows row_of(head, i), i < count, to a new tensor.
template <class RowOf>
TensorView gathered(const TensorView& tensor, int count, RowOf row_of, std::vector<std::byte>& rows) {
  rows.clear();
  for (int head = 0; head < tensor.heads; ++head)
    for (int i = 0; i < count; ++i) {
      const std::byte* row = tensor.row(head, row_of(head, i));
      rows.insert(rows.end(), row, row + tensor.row_bytes());
    }
  return {rows.data(), tensor.dtype, tensor.heads, count, tensor.dim};
}

}  // namespace

const Matrix& block_attention(const LayerView& view, int block) {
  return view.remember("block_attention", {static_cast<double>(block)}, [&] {
    const LayerTensors& tensors = view.tensors();
    Matrix sums(view.query_heads(), view.tokens());
    std::vector<std::byte> queries, keys;
    for (int first = 0; first < view.tokens(); first += block) {
      const int count = std::min(block, view.tokens() - first);
      const std::vector<std::int32_t> before = position_range(0, count), after = position_range(count, 2 * count);
      const auto key = [&](int head, int i) { return view.positions(head)[first + i].number; };
      const auto query = [&](int head, int i) { return stored_query(tensors, key(head / view.group(), i)); };
      LayerTensors of_block;
      of_block.q = gathered(tensors.q, count, query, queries);
      of_block.k = of_block.v = gathered(tensors.k, count, key, keys);
      of_block.query_positions = after;
      const Matrix of_heads = view.backend().attention_sums(of_block, {.queries = after, .resident = before});
      for (int head = 0; head < sums.rows(); ++head)
        std::ranges::copy(of_heads.row(head), sums.row(head).begin() + first);
    }
    return sums;
  });
}

}  // namespace kvreplay
