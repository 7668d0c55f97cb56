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
  if (view_.backend().interruption().ended()) return;  // LayerView::on_threads() throws
  const LayerTensors& tensors = view_.tensors();
  std::vector<double> query(static_cast<std::size_t>(tensors.q.dim));
  read_row(tensors.q, query_head, stored_query(tensors, position), query);
  if (view_.residents().place == Positions::cache) {
    const auto slot = static_cast<std::int32_t>(std::ranges::find(positions_, position) - positions_.begin());
    rotate(tensors.rope, slot - position, query);
  }
  keys_.with(query, 0, logits);
  const double scale = tensors.softmax_scale, cap = tensors.logit_softcap;
  const int lowest = tensors.first_visible(position);
  for (std::size_t j = 0; j < logits.size(); ++j) {
    logits[j] *= scale;
    if (cap > 0) logits[j] = cap * std::tanh(logits[j] / cap);
    if (positions_[j] > position || positions_[j] < lowest) logits[j] = -std::numeric_limits<double>::infinity();
  }
}

int QueryLogits::end_of_visible(std::int32_t position) const {
  auto end = positions_.size();
  while (end > 0 && positions_[end - 1] > position) --end;
  return static_cast<int>(end);
}

}  // namespace kvreplay
