// What plans need to know of a trace beside queries, keys and values.
#pragma once

#include "policies/plan.h"
#include "trace/trace.h"

namespace kvreplay {

/// What the plan divides over `layers` layers of this shape.
Division division_of(const Plan& plan, const LayerShape& shape, int layers, int prompt, int budget,
                     MarkedQuestion question);

/// Throws Error{input} where the values of a layer are read by several layers, each with its own output projection.
void check_projections(const Trace& trace, std::span<const int> layers, const std::string& who);
/// [1, hidden, Hq * d] of a stored layer; without data where the trace does not hold it.
TensorView output_projection(const Trace& trace, int stored_layer);
/// Throws Error{input} unless these layers have queries and keys of passes that repeat the first `prompt` tokens.
void check_reconstruction(const Trace& trace, std::span<const int> layers, int prompt, const std::string& who);
/// Those of a stored layer.
Reconstruction reconstruction(const Trace& trace, int stored_layer);
/// [1, T, 1] norms of the tokens' hidden states at the layer's input; without data where the trace does not hold them.
TensorView input_norms(const Trace& trace, int stored_layer);

}  // namespace kvreplay
