// Attention of the observation window to the tokens before the protected ones, normalised over these alone.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// A mean over the window's queries. Sink logits take no part. Computed on this machine: a backend's softmax covers the
/// window's own tokens too.
struct PrefixAttention {
  int window = 1;            // queries
  double temperature = 1;    // divides the logits
  bool group_first = false;  // one softmax of the largest logits of a group; false: the mean over its heads' softmaxes

  /// [Hkv, n]; 0 for the last `recent` tokens, which take no part.
  const Matrix& operator()(const LayerView& view, const Scoring& how) const;
};

}  // namespace kvreplay
