#include "replay/trace_inputs.h"

#include "policies/selection.h"

namespace kvreplay {

Division division_of(const Plan& plan, const LayerShape& shape, int layers, int prompt, int budget,
                     MarkedQuestion question) {
  const auto [sinks, recent] = kept_by_rule(plan, budget, prompt, question);
  return {
      layers,           prompt, budget, sinks, recent, rows_of(plan.grouping.heads, shape.query_heads, shape.kv_heads),
      shape.query_heads};
}

namespace {

TensorView tensor_at(const Trace& trace, int stored_layer, std::string_view end_of_path) {
  for (const StoredTensor& tensor : trace.tensors(stored_layer))
    if (tensor.path.ends_with(end_of_path)) return tensor.view;
  return {};
}

}  // namespace

TensorView output_projection(const Trace& trace, int stored_layer) { return tensor_at(trace, stored_layer, "/wo"); }

Reconstruction reconstruction(const Trace& trace, int stored_layer) {
  return {tensor_at(trace, stored_layer, "/q_reconstruction"), tensor_at(trace, stored_layer, "/k_reconstruction"),
          trace.header().passes()};
}

TensorView input_norms(const Trace& trace, int stored_layer) { return tensor_at(trace, stored_layer, "/input_norm"); }

}  // namespace kvreplay
