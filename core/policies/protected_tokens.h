// Protected tokens in the place of a policy's own, so that policies are compared with the same ones.
#pragma once

#include <string>
#include <string_view>

#include "parameters.h"
#include "policies/policy.h"

namespace kvreplay {

/// Attention sinks and recent window. Where both exceed B, Protection::within() clamps them.
struct ProtectedTokens {
  int sinks = 0;
  Amount recent = Amount::tokens(0);  // a fraction is one of the budget

  void parameters(Parameters& p);

  /// "sinks=4,recent=10%", or one of the two: the other protects none. Throws Error{usage} at `where`.
  static ProtectedTokens parse(const std::string& where, std::string_view text);
  /// With both values: equal text, equal tokens.
  std::string text() const;

  /// Replaces the plan's protected tokens. Its observation window still scores; its tokens compete.
  void replace_in(Plan& plan) const;
};

/// The observation window ends with the marked question. The tokens behind the question are protected and score
/// nothing.
void end_window_at_question(Plan& plan);

}  // namespace kvreplay
