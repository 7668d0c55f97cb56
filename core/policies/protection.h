// Tokens that stay by rule, whatever their scores: the first ones and the last ones.
#pragma once

#include "parameters.h"

namespace kvreplay {

struct Protection {
  int sinks = 0;
  Amount recent = Amount::tokens(0);  // a fraction is one of the budget
  int least_recent = 0;               // of a fraction, however small the budget
  bool recent_of_prompt = false;      // a fraction is one of P, and a token more (PyramidInfer's own lengths)

  /// sinks' = min(sinks, B), recent' = min(recent, B - sinks').
  struct Clamped {
    int sinks = 0;
    int recent = 0;
  };
  Clamped within(int budget, int prompt) const;
};

}  // namespace kvreplay
