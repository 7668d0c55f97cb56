// Quantised keys and values, with a scale and a zero point for each group (Liu et al. 2024, KIVI, arXiv:2402.02750).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Of the n kept tokens of a head, in ascending order, the first n - (n mod `residual`) have quantised keys, all of
/// them where `residual` is 0: a group is `group` tokens of a channel. All but the last `residual` tokens have
/// quantised values: a group is `group` channels of a token. The last group may be short. In float32, with levels =
/// 2^bits - 1:
///   mn = fp16(min),  s = fp16((max - mn) / levels),  q = rint(clamp((x - mn) / s, 0, levels)),  x~ = q s + mn
/// All other numbers are unchanged, tokens after the prompt included. The sets are one for each KV head, or
/// one for the layer.
struct Quantised {
  int bits = 2;
  int group = 32;
  int residual = 128;

  void parameters(Parameters& p);
  /// Its bytes: bits + 32/group bits for a quantised number, 16 for another one, over all kept tokens of the prompt.
  StorePtr store() const;
};

}  // namespace kvreplay
