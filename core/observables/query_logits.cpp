#include "observables/query_logits.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "attention/softmax_keys.h"
#include "float_types.h"

namespace kvreplay {

QueryLogits::QueryLogits(const LayerView& view, int kv_head)
    : view_(view), positions_(view.positions(kv_head).numbers()), keys_(view.keys(), kv_head) {}

void QueryLogits::of(int query_head, std::int32_t position, std::span<double> logits) const {
  of_each(query_head, std::span(&position, 1), logits);
}

void QueryLogits::of_each(int query_head, std::span<const std::int32_t> queries, std::span<double> logits) const {
  if (view_.backend().interruption().ended()) return;  // LayerView::on_threads() throws
  const LayerTensors& tensors = view_.tensors();
  const auto dim = static_cast<std::size_t>(tensors.q.dim), count = logits.size() / queries.size();
  std::vector<double> vectors(queries.size() * dim);
  for (std::size_t i = 0; i < queries.size(); ++i) {
    const std::span<double> query = std::span(vectors).subspan(i * dim, dim);
    read_row(tensors.q, query_head, stored_query(tensors, queries[i]), query);
    if (view_.residents().place == Positions::cache) {
      const auto slot = static_cast<std::int32_t>(std::ranges::find(positions_, queries[i]) - positions_.begin());
      rotate(tensors.rope, slot - queries[i], query);
    }
  }
  keys_.with_each_fused(vectors, 0, logits);
  const double scale = tensors.softmax_scale, cap = tensors.logit_softcap;
  constexpr double invisible = -std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < queries.size(); ++i) {
    const std::span<double> row = logits.subspan(i * count, count);
    for (double& logit : row) logit *= scale;
    if (cap > 0)
      for (double& logit : row) logit = cap * std::tanh(logit / cap);
    const auto before = static_cast<std::size_t>(end_of_visible(tensors.first_visible(queries[i]) - 1));
    std::ranges::fill(row.first(std::min(before, count)), invisible);
    std::ranges::fill(row.subspan(std::min(static_cast<std::size_t>(end_of_visible(queries[i])), count)), invisible);
  }
}

int QueryLogits::end_of_visible(std::int32_t position) const {
  return static_cast<int>(std::ranges::upper_bound(positions_, position) - positions_.begin());
}

}  // namespace kvreplay
