// Budget allocation with layers that keep the whole prompt.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "policies/policy.h"

namespace kvreplay {

/// Treated layers that a policy does not compress: "none", or numbers with commas between them.
struct LayerList {
  static constexpr const char* name = "skip_layers";

  std::string text = "none";

  void add_to(Parameters& p, const char* help);
  /// Ascending, each once.
  std::vector<int> layers() const;
  /// Throws Error{usage} for a layer that is not among `count` layers.
  void check(int count) const;
};

/// Treated layers that keep every token (KVCache-Factory's L2Norm); the rest of L * B is divided equally among the
/// others, with at least the protected tokens (or one token) and at most P each. The counts throw Error{usage} for a
/// layer that does not exist, and for an L * B that is too small.
struct SkippedLayers {
  LayerList skipped = {};

  void parameters(Parameters& p);
  /// Uniform if no layer is skipped.
  AllocatorPtr allocator() const;
};

}  // namespace kvreplay
