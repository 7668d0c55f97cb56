// Selections by rule alone: no token is scored.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Tokens floor(i n / B), i = 0 ... B-1, of n resident ones.
Selector stride();

/// The first ceil(B/2) and the last floor(B/2) tokens; with `keep_question` and a question that ends the prompt, that
/// rule for what stands before it, and the question whole.
Selector head_and_tail(bool keep_question);

/// The first and the last tokens that stay by rule, and no other: no budget is filled.
Selector by_rule_alone();

}  // namespace kvreplay
