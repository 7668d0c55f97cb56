// Column sums of attention: row states, then columns; O(n) memory beyond the tensors.
#include <algorithm>
#include <cassert>

#include "cuda/attention_operands.h"
#include "cuda/device_call.h"
#include "error.h"

namespace kvreplay {

Matrix CudaBackend::attention_sums(const LayerTensors& layer, const AttentionSums& what) {
  const bool counts = what.above_uniform > 0.0;
  assert(!counts || what.weights.empty());
  const bool all_take_part = what.resident.empty();
  const int columns =
      all_take_part ? what.columns : static_cast<int>(what.resident.size()) / std::max(1, what.resident_rows);
  Matrix sums(layer.q.heads, columns);
  if (what.queries.empty() || columns == 0) return sums;

  std::vector<SoftmaxKeys> softmax_keys;
  for (int row = 0; row < (all_take_part ? 1 : what.resident_rows); ++row) {
    SoftmaxKeys some{.count = all_take_part ? what.queries.back() + 1 : columns,
                     .positions = all_take_part ? Positions::original : what.positions};
    if (!all_take_part) {
      const auto count = static_cast<std::size_t>(columns);
      some.resident = what.resident.subspan(static_cast<std::size_t>(row) * count, count);
    }
    softmax_keys.push_back(some);
  }
  DeviceCall call(*this);
  PlacedQueries placed(call, layer, what.queries, softmax_keys);
  const double* weights = what.weights.empty() ? nullptr : call.copy(what.weights);

  for (int first = 0; first < layer.k.heads; first += placed.kv_heads_at_once()) {
    const PlacedQueries::Heads heads = placed.heads(first, std::min(placed.kv_heads_at_once(), layer.k.heads - first));
    const AttentionTask& task = heads.task();
    const auto query_heads = static_cast<std::size_t>(task.kv_heads * task.group);
    DeviceBuffer<RowPartial> row_sums(memory_);
    DeviceBuffer<RowState> states(memory_);
    DeviceBuffer<double> column_parts(memory_), made(memory_);
    find_row_states(placed.form(), task, weights, what.above_uniform, row_sums.at_least(row_partials(task)),
                    states.at_least(query_heads * static_cast<std::size_t>(task.padded_queries)), call.bad(),
                    call.stream());
    add_columns(placed.form(), task, states.data(), what.own_key, counts, columns,
                column_parts.at_least(column_partials(task, columns)),
                made.at_least(query_heads * static_cast<std::size_t>(columns)), call.stream());
    call.fetch(static_cast<const double*>(made.data()),
               sums.values().subspan(static_cast<std::size_t>(first * task.group) * static_cast<std::size_t>(columns),
                                     query_heads * static_cast<std::size_t>(columns)));
  }
  if (call.found_bad()) throw Error{Refusal::input, "attention", "logits", "finite numbers", "NaN or Inf"};
  return sums;
}

}  // namespace kvreplay
