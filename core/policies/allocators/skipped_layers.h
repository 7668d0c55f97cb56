// How the budget is divided where some layers keep all of the prompt.
#pragma once

#include <string>

#include "policies/policy.h"

namespace kvreplay {

/// Treated layers that keep every token (KVCache-Factory's L2Norm); what they leave of L * B is divided evenly, between
/// what stays by rule (one token at least) and P. The counts throw Error{usage} for a layer that does not exist, and
/// where L * B has no room for that.
struct SkippedLayers {
  std::string layers = "none";  // "none", or numbers with commas between them

  void parameters(Parameters& p);
  /// Uniform where none is skipped.
  AllocatorPtr allocator() const;
};

}  // namespace kvreplay
