// Attention of the passes that repeat the prompt, in float32 on this machine.
#pragma once

#include <span>

#include "observables/layer_view.h"

namespace kvreplay {

/// Prompt tokens that take part in the softmax of a pass: the first `sinks`, and [first, end).
struct PassTokens {
  int sinks = 0;  // at most `first`
  int first = 0;
  int end = 0;
};

/// [Hq, P]: the largest attention that a query of a pass gives to each token of the pass's [first, end); 0 for tokens
/// of no pass. The softmax runs over the read tokens and over the tokens of the pass up to the query, as far as the
/// query sees them, with the sink logit. `reads` has one element for each pass.
const Matrix& largest_attention_of_passes(const LayerView& view, std::span<const PassTokens> reads);

}  // namespace kvreplay
