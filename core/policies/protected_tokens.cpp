#include "policies/protected_tokens.h"

namespace kvreplay {
namespace {

/// Fixes the observation window before the protected tokens change: the last tokens that the plan protects now.
void fix_observing_tokens(Plan& plan) {
  if (!plan.observing) plan.observing = plan.protect;
}

}  // namespace

void ProtectedTokens::parameters(Parameters& p) {
  p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens, always kept");
  p.add("recent", recent, "recent window: last tokens, always kept");
}

ProtectedTokens ProtectedTokens::parse(const std::string& where, std::string_view text) {
  ProtectedTokens tokens;
  Parameters parameters{where};
  tokens.parameters(parameters);
  parameters.set_list(text, "sinks=4,recent=10%");
  return tokens;
}

std::string ProtectedTokens::text() const {
  ProtectedTokens same = *this;
  Parameters parameters{"protect"};
  same.parameters(parameters);
  return parameters.canonical();
}

void ProtectedTokens::replace_in(Plan& plan) const {
  fix_observing_tokens(plan);
  plan.protect = {.sinks = sinks, .recent = recent};
}

void end_window_at_question(Plan& plan) {
  fix_observing_tokens(plan);
  plan.window_at = WindowAt::question;
  plan.protect.behind_question = true;
}

}  // namespace kvreplay
