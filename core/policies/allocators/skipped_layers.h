// Budget allocation with layers that keep the whole prompt.
#pragma once

#include <string>

#include "policies/policy.h"

namespace kvreplay {

/// Treated layers that keep every token (KVCache-Factory's L2Norm); the rest of L * B is divided equally among the
/// others, with at least the protected tokens (or one token) and at most P each. The counts throw Error{usage} for a
/// layer that does not exist, and for an L * B that is too small.
struct SkippedLayers {
  std::string layers = "none";  // "none", or numbers with commas between them

  void parameters(Parameters& p);
  /// Uniform if no layer is skipped.
  AllocatorPtr allocator() const;
};

}  // namespace kvreplay
