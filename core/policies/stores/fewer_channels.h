// Prunes key channels with the smallest contribution to the logits (Xu et al. 2024, ThinK, arXiv:2407.21018).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Of each KV head the floor(d * ratio) channels c of the least
///   mean over its query heads of (mean_{last `window` queries} q_c^2) * mean_{held keys} k_c^2
/// are dropped from its keys, that is read as 0; of equal ones the lower channel is kept. The last `recent` held tokens
/// keep all channels, and so do tokens after the prompt. The product is the squared Frobenius norm of the
/// channel's contribution to the logits.
struct FewerChannels {
  int window = 32;
  double ratio = 0.4;
  int recent = 32;

  void parameters(Parameters& p);
  /// Its bytes: numbers that are kept, in the trace's type.
  StorePtr store() const;
};

}  // namespace kvreplay
