// Tokens that stay by rule, whatever their scores: the first ones and the last ones.
#pragma once

#include <cstdint>
#include <span>

#include "parameters.h"
#include "positions.h"

namespace kvreplay {

/// The question that ends the prompt.
struct EndQuestion {
  int last_tokens = 0;  // so many
  bool marked = false;  // or the marked question, where there is one

  /// Of P and the begin of the marked question; -1: none is marked.
  int tokens(int prompt, int begin) const {
    return marked && begin >= 0 ? prompt - begin : std::min(last_tokens, prompt);
  }
};

struct Protection {
  int sinks = 0;
  Amount recent = Amount::tokens(0);  // a fraction is one of the budget
  int least_recent = 0;               // of a fraction, however small the budget
  bool recent_of_prompt = false;      // a fraction is one of P, and a token more (PyramidInfer's own lengths)
  EndQuestion question = {};          // where it has tokens, the last ones are these, whatever `recent` says
  bool behind_question = false;       // beside these, the tokens behind the marked question

  /// sinks' = min(sinks, B), recent' = min(recent, B - sinks').
  struct Clamped {
    int sinks = 0;
    int recent = 0;
  };
  /// All of the budget, whatever it is.
  bool is_all() const { return recent.is_fraction() && recent.share == 1.0; }
  Clamped within(int budget, int prompt, MarkedQuestion marked) const;
};

/// How many of the first `sinks` tokens are resident: a sink that was evicted while fewer tokens were kept is no sink
/// any more. Protection evicts the same ones in all rows.
int resident_sinks(std::span<const std::int32_t> positions, int sinks);

}  // namespace kvreplay
