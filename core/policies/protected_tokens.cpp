#include "policies/protected_tokens.h"

#include <set>

namespace kvreplay {
namespace {

/// The tokens that the plan protects by now are those whose queries score, whatever it protects later.
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
  std::set<std::string_view> given;
  for (const std::string_view piece : split_list(where, text)) {
    const std::size_t equals = piece.find('=');
    if (equals == std::string_view::npos)
      throw Error{Refusal::usage, where, "not a value", "sinks=4,recent=10%", std::string(piece)};
    const std::string_view name = piece.substr(0, equals);
    if (!given.insert(name).second) throw Error{Refusal::usage, where, "given twice", "", std::string(name)};
    parameters.set(name, piece.substr(equals + 1));
  }
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
