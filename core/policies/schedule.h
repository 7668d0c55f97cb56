// When tokens are evicted, and so what a query sees: R(t) changes with time.
//
// At step t: append, attend, then evict. `once` sees R(t) = I and the tokens after the prompt. Where each query reads
// some of what is held, nothing is evicted.
#pragma once

#include <functional>
#include <string_view>
#include <variant>

#include "attention/kept_set.h"
#include "observables/layer_view.h"
#include "parameters.h"

namespace kvreplay {

/// When the prompt has been seen, down to B.
struct Once {};

/// What is known at the end of a block of the context.
struct BlockEnd {
  int budget = 0;   // B less the spared tokens
  int context = 0;  // n: tokens that come in blocks
  int seen = 0;     // of them so far
  int held = 0;     // before this block
  int block = 0;    // tokens of this block
};

/// The prompt comes in blocks of `block` tokens; a block attends to what is held and to itself, then what is held is
/// cut. The last tokens of the prompt may be spared: they come after all blocks and stay. Tokens after the prompt stay.
struct Blocks {
  std::string_view name = "every";  // of the schedule, as users call it
  int block = 512;
  /// How many tokens, of P and the begin of the marked question (-1: none is marked); empty: none.
  std::function<int(int prompt, int question)> spared = {};
  bool asks_marked_question = false;              // where none is marked, others take its place
  std::function<int(const BlockEnd&)> keep = {};  // how many of the context are held from here on; empty: `budget`
  bool by_relevance = false;                      // slots in the order of the scores, not of the positions

  int spared_tokens(int prompt, int question) const { return spared ? spared(prompt, question) : 0; }
};

/// When `peak` tokens are held, they are cut to `keep`; also after the prompt. Fractions are read as those of a budget
/// are. There is no other budget.
struct Threshold {
  Amount peak = Amount::tokens(4000);
  Amount keep = Amount::tokens(2000);
};

/// After each token the lowest score goes while more than B are held, also after the prompt.
struct Online {
  bool grow = false;          // after the prompt nothing goes
  bool prefill_once = false;  // the prompt is cut as by `Once`, its scores go on
};

/// What each query reads of a layer that holds all of the prompt.
struct LayerReads {
  std::function<KeptSet(int query)> at;  // as a set over [0, P); tokens after the prompt are read too
  double bytes = 0;                      // that are held for it, beside keys and values
};

/// Nothing goes: B is how many tokens of the prompt a query reads. A budget of P or more reads all.
struct Reads {
  std::function<LayerReads(const LayerView&, int budget)> of_layer;
};

/// The first and the last tokens by rule: query t sees the sinks and the last B - sinks tokens, itself included.
struct Rolling {};

using Schedule = std::variant<Once, Blocks, Threshold, Online, Rolling, Reads>;

}  // namespace kvreplay
