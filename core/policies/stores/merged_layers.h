// Two adjacent layers that share a direction for each key and value (Liu et al. 2024, MiniCache, arXiv:2405.14366).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Of L layers those from ceil(L/2) on are paired from below; a layer without a partner is stored alone. A token's
/// vectors x in layers l-1 and l, keys and values separately in each KV head, are stored as |x| e, with
///   e = (sin((1-t) w) x(l-1)/|x(l-1)| + sin(t w) x(l)/|x(l)|) / sin w,  w the angle between them
/// Unmerged tokens: those with an angle above min + `gap` (max - min) over the head's tokens (`paper`), or with the
/// floor(`gap` P) largest angles, of equal ones the lower position (`code`); and zero and opposite vectors, which have
/// no interpolated direction. In float64, rounded once.
struct MergedLayers {
  enum class Distance { paper, code };

  double t = 0.6;
  Distance distance = Distance::paper;
  double gap = 0.05;

  void parameters(Parameters& p);
  /// Its bytes, half of a pair's in each layer: d + 2 numbers for two merged vectors, 2d for two unmerged ones, in
  /// the trace's type.
  StorePtr store() const;
};

}  // namespace kvreplay
