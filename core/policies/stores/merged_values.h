// Merges the values of evicted tokens into those of kept tokens (Zhang et al. 2024, CaM, PMLR 235:58840-58850).
#pragma once

#include <cstdint>

#include "policies/policy.h"

namespace kvreplay {

/// After query t has attended, each token e of a KV head that is then evicted adds v_e / m to the values of the next
/// `merge` tokens that remain (m of them, fewer where fewer remain, possibly none) with probability
///   clamp(A_e / mean of A, 0, 1)
/// The mean is over these m tokens (`receivers`) or over all later ones that remain (`later`); 0/0 is 0. A is the mean
/// over the head's query heads of the attention over the resident tokens: that of query t (`current`), or of all
/// queries up to t while a token was resident (`cumulative`). v_e holds the earlier merges. `expected` merges v_e / m
/// times the probability, `sampled` all of it where uniform(chain(seed, layer, head, e)) is below it, `layer` being the
/// stored layer's number. Values are summed in float64 and rounded to float32 where they are read.
struct MergedValues {
  enum class Mode { expected, sampled };
  enum class Attention { cumulative, current };
  enum class Mean { receivers, later };

  int merge = 32;
  Mode mode = Mode::expected;
  Attention attention = Attention::cumulative;
  Mean mean = Mean::receivers;
  std::uint64_t seed = 0;

  void parameters(Parameters& p);
  /// Its bytes are those of the kept tokens.
  StorePtr store(Positions positions = Positions::original) const;
};

}  // namespace kvreplay
