// A policy is a plan made of parts: who scores, who selects, how the budget is divided, which layers share.
//
// A policy file names only what its paper changes; every member of Plan has a default. P is the number of tokens under
// compression, H the rows of the policy's granularity (KV heads, query heads, or 1 for the layer), B the budget: tokens
// kept per layer and head on average.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "attention/kept_set.h"
#include "attention/layer_view.h"
#include "matrix.h"
#include "parameters.h"
#include "registry.h"

namespace kvreplay {

/// What a policy says of itself.
struct Card {
  const char* name;
  const char* summary;
  const char* paper;
  const char* score;
};

/// Which captured queries the observables read. A trace that lacks them is refused before the run.
struct Needs {
  int last_queries = 0;         // the last so many of the prompt
  bool all_queries = false;     // all of the prompt
  bool future_queries = false;  // eval queries: the mark of an oracle
};

inline Needs last_queries(int window) { return {.last_queries = window}; }
inline Needs all_queries() { return {.all_queries = true}; }
inline Needs future_queries() { return {.future_queries = true}; }

/// How important each token is: [H, P], larger stays.
using Scorer = std::function<Matrix(const LayerView&)>;

/// One row to select from: `scores` [P], empty without a scorer.
struct Row {
  std::span<const double> scores;
  int prompt = 0;  // P
  int budget = 0;  // tokens that this row may keep, < P
};

/// Kept positions, ascending. The first `sinks` and the last `recent` tokens of the prompt are there by rule, not by
/// score.
struct Kept {
  std::vector<std::int32_t> positions;
  int sinks = 0;
  int recent = 0;
};

using Selector = std::function<Kept(const Row&)>;

/// Every row of every layer gets B.
struct Uniform {};
/// Keeps all and has no budget: the control.
struct Everything {};
/// Counts of all treated layers at once, [L][H], from all layers' scores [L] of [H, P]. Sum at most L*H*B.
using AcrossLayers = std::function<std::vector<std::vector<int>>(std::span<const Matrix> scores, int budget)>;
/// Counts of one layer, [H], from its scores. Sum at most H*B.
using WithinLayer = std::function<std::vector<int>(const Matrix& scores, int budget)>;
/// The counts and the granularity of another policy's selection.
struct CountsOf {
  std::string policy;
};

/// The type says what must be known before a layer's set is final: nothing, the layer, all layers, another policy.
using Allocator = std::variant<Uniform, Everything, WithinLayer, AcrossLayers, CountsOf>;

/// The treated layer whose set layer l of L uses, row by row.
using Sharing = std::function<int(int layer, int layers)>;

Selector top_k();      // parts/top_k.h
Sharing no_sharing();  // parts/sharing.h

struct Plan {
  Heads heads = Heads::kv;
  Needs needs = {};
  Scorer score = {};
  Selector select = top_k();
  Allocator allocate = Uniform{};
  Sharing share = no_sharing();
};

/// A registered policy with values of its own.
class Policy {
 public:
  virtual ~Policy() = default;
  virtual const Card& card() const = 0;
  /// Declares the parameters, bound to this object.
  virtual Parameters parameters() = 0;
  virtual Plan plan() const = 0;
};

struct PolicyEntry {
  std::string name;
  std::unique_ptr<Policy> (*make)();
};

Registry<PolicyEntry>& policies();

/// `T` has a static `card`, `parameters(Parameters&)` and `plan()`. Define one in the policy's file.
template <class T>
struct Registered {
  struct Holder final : Policy {
    T value;
    const Card& card() const override { return T::card; }
    Parameters parameters() override {
      Parameters declared{T::card.name};
      value.parameters(declared);
      return declared;
    }
    Plan plan() const override { return value.plan(); }
  };
  Registered() {
    policies().add({T::card.name, [] { return std::unique_ptr<Policy>(new Holder); }});
  }
};

/// Which question of Plan a part answers.
enum class PartKind { scorer, selector, allocator, sharing };

/// A part says what it is, so that it can be listed beside the policies made of it.
struct PartCard {
  std::string name;
  PartKind kind;
  std::string summary;
};

Registry<PartCard>& parts();

struct RegisteredPart {
  explicit RegisteredPart(PartCard card) { parts().add(std::move(card)); }
};

}  // namespace kvreplay
