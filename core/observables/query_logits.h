// Logits of single queries over the resident tokens, in float64 on this machine: for scores that are not sums of
// attention, which a backend computes. Last bits depend on the SIMD level.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "observables/layer_view.h"
#include "observables/vector_products.h"

namespace kvreplay {

/// Of the query heads that read one KV head. The view must outlive it.
class QueryLogits {
 public:
  /// The most queries of a block, for which of_each() reads the keys from memory once.
  static constexpr std::size_t at_once = 16;

  QueryLogits(const LayerView& view, int kv_head);

  /// z(t,j) of the query at position t for the first logits.size() resident tokens, under the softcap; -infinity for
  /// tokens that the query does not see. With cache positions the query must be resident.
  void of(int query_head, std::int32_t position, std::span<double> logits) const;

  /// The same of several queries, [positions, n]: in less time than one after the other.
  void of_each(int query_head, std::span<const std::int32_t> positions, std::span<double> logits) const;

  /// Number of resident tokens up to the last one that the query sees.
  int end_of_visible(std::int32_t position) const;

  /// Calls visit(block, width) with blocks of ascending queries; `width`: end_of_visible() of the last query of a
  /// block.
  template <class Visit>
  void in_blocks(std::span<const std::int32_t> queries, Visit visit) const {
    for (std::size_t first = 0; first < queries.size(); first += at_once) {
      const std::span<const std::int32_t> block = queries.subspan(first, std::min(at_once, queries.size() - first));
      visit(block, static_cast<std::size_t>(end_of_visible(block.back())));
    }
  }

 private:
  const LayerView& view_;
  std::span<const std::int32_t> positions_;
  VectorProducts keys_;
};

}  // namespace kvreplay
