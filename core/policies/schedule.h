// When tokens are evicted, and so what a query sees: R(t) changes with time.
//
// At step t: append, attend, then evict. Where sets are decided once, a query sees R(t) = I and the tokens after the
// prompt. The schedules are in policies/schedules.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "attention/kept_set.h"
#include "observables/layer_view.h"
#include "parameters.h"
#include "policies/properties.h"

namespace kvreplay {

struct LayerSelection;  // policies/selection.h

/// When a plan's sets are decided, as a live system would have to: after an uncompressed prefill, whose queries, keys
/// and values no eviction has changed; while it runs, so that later queries and deeper layers feel the eviction; by
/// later queries, which no system has; or never, because all tokens are held.
enum class Decision { after_prefill, during_prefill, future, never };

/// What a row may hold: `tokens`, or a share of those seen so far, `tokens` when the prompt has been.
struct Allowance {
  int tokens = 0;
  double of_seen = 0;  // 0: it stands

  int after(int seen) const { return of_seen > 0 ? Amount::fraction(of_seen).of_prompt(seen) : tokens; }
};

/// A layer under a policy at a budget, which is less than P where there is one.
struct ScheduledLayer {
  const LayerView& view;
  const Plan& plan;
  Allowance budget;
  const std::string& policy;          // its name, for messages
  const std::function<void()>& poll;  // called before each step; it may throw
};

/// What a schedule is checked against, before any layer is read.
struct ScheduledPrompt {
  const std::string& policy;  // its name, for messages
  int tokens = 0;             // P
  MarkedQuestion question = {};
  Allowance budget = {};
  bool evicts = true;    // the budget is less than P, or there is none
  int first_query = -1;  // the first eval query; -1: there is none
};

/// What a backend is to evict in a layer. A schedule that needs more afterwards derives from it.
struct OnlineCall {
  OnlineEviction what = {};

  virtual ~OnlineCall() = default;
};

/// What each query reads of a layer that holds all of the prompt.
struct LayerReads {
  /// Of each budget, tokens of the prompt that a query may read, less than P: a set over [0, P). Tokens after the
  /// prompt are read too.
  std::function<std::vector<KeptSet>(int query, std::span<const int> budgets)> at;
  double bytes = 0;         // that are held for it, beside keys and values
  LogWeights weights = {};  // of the tokens that are read; empty: 1
};

/// What each query of a schedule with sparse reads ranks, to read the best of it.
enum class ScoredUnit { none, token, page };

/// Every plan has one, which many plans may share.
class Schedule {
 public:
  virtual ~Schedule() = default;

  /// As it is asked for: "schedule=every".
  virtual std::string name() const = 0;
  /// during_prefill: sets change with time, and run() makes them. after_prefill: the engine chooses once, when the
  /// prompt has been seen. never: each query reads some of what is held, as reads() says.
  virtual Decision decided() const { return Decision::during_prefill; }
  /// What the other parts of its plan must provide.
  virtual Requirements required() const;
  /// Whether it evicts after the prompt, too, and so reads queries there.
  virtual bool goes_on_after_prompt() const { return false; }
  /// Whether a token may go after each query, by products that no other schedule needs.
  virtual bool is_online() const { return false; }
  /// Whether its layer is copied for query heads that have sets of their own.
  virtual bool repeats(Heads) const { return false; }
  /// Whether B says how much is held.
  virtual bool has_budget() const { return true; }
  /// Tokens of a row between evictions, where has_budget() is false.
  virtual int held(int prompt) const { return prompt; }
  /// The last tokens of the prompt, which it evicts at no time.
  virtual int spared(int /*prompt*/, MarkedQuestion) const { return 0; }
  /// Whether these are the question that ends the prompt, and whole.
  virtual bool spares_question() const { return false; }
  /// Whether the marked question says which these are; without one, others take its place.
  virtual bool asks_marked_question() const { return false; }
  /// Throws Error{usage} where its own values, and Error{input} where the budget does not fit the prompt.
  virtual void check(const ScheduledPrompt&) const {}

  /// The sets of a layer. Throws what check() would, and what `poll` throws.
  virtual LayerSelection run(const ScheduledLayer&) const;
  /// Of online schedules, so that the backend evicts for several budgets side by side; null: run() makes the sets
  /// alone.
  virtual std::unique_ptr<OnlineCall> call(const ScheduledLayer&) const { return nullptr; }
  /// The sets of a layer, from what has gone by its call.
  virtual LayerSelection after(const ScheduledLayer&, const OnlineCall&, std::span<const std::int32_t> gone) const;
  /// Of schedules that decide nothing: `none` where the trace says what a query reads.
  virtual ScoredUnit scored_unit() const { return ScoredUnit::none; }
  /// Of schedules that decide nothing: whether tokens that a query reads have weights.
  virtual bool weighs_tokens() const { return false; }
  /// Tokens that a query reads at least, whatever the budget.
  virtual int least_read() const { return 0; }
  /// Of schedules that decide nothing.
  virtual LayerReads reads(const LayerView&) const { return {}; }
};

using SchedulePtr = std::shared_ptr<const Schedule>;

}  // namespace kvreplay
