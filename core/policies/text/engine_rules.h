// The rules by which an inference engine evicts, around any policy.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "policies/protected_tokens.h"
#include "policies/text/structure.h"

namespace kvreplay {

/// Pages, protected tokens, shared sets and schedule of an engine. docs/engines.md says where each comes from, and what
/// the engine does beside it.
struct EngineRules {
  std::string_view name;
  std::optional<Structure> structure = {};  // none: it evicts single tokens
  std::string_view parts = {};              // of the plan, as users write them; empty: none
  ProtectedTokens protect = {};

  /// "openvino", "sglang", "trtllm" or "vllm". Throws Error{usage} for another name.
  static const EngineRules& named(std::string_view name);

  /// The policy with the engine's parts. Throws Error{usage} where they do not fit.
  std::string around(const std::string& policy) const;
};

}  // namespace kvreplay
