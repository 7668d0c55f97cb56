// Merges the values of evicted tokens into those of kept tokens (Zhang et al. 2024, CaM, PMLR 235:58840-58850).
#pragma once

#include <cstdint>

#include "policies/policy.h"

namespace kvreplay {

/// Each evicted token i of a KV head, the newest first, adds v_i / m to the values of the next `merge` kept tokens
/// (m of them, fewer at the end of the prompt, possibly none) with probability
///   clamp(A_i / mean of A over these, 0, 1)
/// A: the attention that a token has received from all prompt queries, mean over the head's query heads; 0/0 is 0.
/// `expected` takes v_i / m times the probability, `sampled` all of it where uniform(chain(seed, layer, head, i)) is
/// below it, `layer` being the stored layer's number. Sums are float64, rounded once.
struct MergedValues {
  enum class Mode { expected, sampled };

  int merge = 32;
  Mode mode = Mode::expected;
  std::uint64_t seed = 0;

  void parameters(Parameters& p);
  /// Its bytes are those of the kept tokens.
  StorePtr store() const;
};

}  // namespace kvreplay
