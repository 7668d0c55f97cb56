// Selections by position alone: no token is scored.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Tokens floor(i n / B), i = 0 ... B-1, of n resident ones.
Selector stride();

/// The first ceil(B/2) and the last floor(B/2) tokens; with `keep_question` and a question that ends the prompt, the
/// same for the tokens before it, and the whole question.
Selector head_and_tail(bool keep_question);

/// The protected tokens alone; they do not fill a budget.
Selector by_rule_alone();

}  // namespace kvreplay
