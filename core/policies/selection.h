// What a policy keeps of one layer, and how rows of it are scored and chosen.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "attention/kept_set.h"
#include "observables/layer_view.h"
#include "policies/plan.h"

namespace kvreplay {

/// What each query reads at one budget, as in LayerReads.
struct QueryReads {
  std::function<KeptSet(int query)> at;
  double bytes = 0;
  LogWeights weights = {};
};

/// One layer's set, checked where it is made: ascending, unique, below the boundary, within the budget.
struct LayerSelection {
  KeptSet set;               // at the end of the prompt
  std::vector<int> sinks;    // [H] first tokens kept by rule
  std::vector<int> recent;   // [H] last tokens kept by rule
  std::vector<int> granted;  // [H] the budget of each row
  int source = 0;            // treated layer whose set this is
  /// [H, T], of schedules other than once: position of the query after which the token went, -1 never.
  std::vector<std::int32_t> evicted_at = {};
  /// Kept positions of all rows, one row after the other, in the order of their slots; empty: ascending.
  std::vector<std::int32_t> slots = {};
  /// Of policies that hold all and read some, while the layer is in use.
  QueryReads reads = {};

  bool changes_with_time() const { return !evicted_at.empty(); }
  bool differs_by_query() const { return changes_with_time() || reads.at; }
  /// [T] of evicted_at.
  std::span<std::int32_t> evicted_of(int row);
  std::span<const std::int32_t> evicted_of(int row) const;
  /// Of `slots`, which must not be empty.
  std::span<const std::int32_t> slots_of(int row) const;
  /// Kept positions of a row in the order of their slots, whatever that is.
  std::vector<std::int32_t> in_slot_order(int row) const;
  /// R(t), where it differs by query: what query t sees, t itself included, as a set over [0, T); or over [0, P), where
  /// each query reads some and t may be missing.
  KeptSet seen_by(int query) const;
};

LayerSelection empty_selection(const LayerView& view, Heads heads);

/// Fills a row of `set` from `evicted_at`: what is held when the prompt has been seen and its last eviction is done.
void hold_at_end_of_prompt(LayerSelection& selection, int row);

/// What one row is asked for.
struct RowBudget {
  int count = 0;                     // tokens that it may keep
  Protection::Clamped by_rule = {};  // at the policy's budget; clamped to `count` where that is less
  int row = 0;                       // its number
};

/// Which of `tokens` resident tokens stay, by their numbers, ascending: all where the row may keep as many. `scores`
/// are theirs (empty without a scorer), `view` is the layer while it is resident, else null. Throws Error{internal} for
/// a selection that is not ascending, not resident or over its budget; `who` is the policy.
Kept choose_row(const Selector& select, int tokens, std::span<const double> scores, RowBudget budget,
                const LayerView* view, const std::string& who);
/// The same of tokens at these positions, in any order; those that stay are given by ascending positions.
Kept choose_row(const Selector& select, std::span<const std::int32_t> positions, std::span<const double> scores,
                RowBudget budget, const LayerView* view, const std::string& who);

/// Enters a row's kept positions.
void enter_row(LayerSelection& selection, int row, const Kept& kept, int granted);

/// Enters in all rows which of their tokens are protected, as far as they are held.
void enter_protected(LayerSelection& selection, Protection::Clamped protected_tokens, int granted);

/// Tokens that are protected at a budget: of all of the prompt, where the policy has none.
Protection::Clamped kept_by_rule(const Plan& plan, int budget, int prompt, MarkedQuestion question);

/// Arguments of the plan's scorer. `by_rule`: protected tokens; `budget`: under a schedule the tokens kept now.
Scoring scoring_of(const Plan& plan, Protection::Clamped by_rule, int budget, int prompt, MarkedQuestion question);

/// The members of `how` that the plan's scorer reads; the others have their defaults.
Scoring inputs_of_scorer(const Plan& plan, Scoring how);

/// [H, n] scores of what is resident. Throws Error{input} where one is not a number.
Matrix score_tokens(const LayerView& view, const Plan& plan, const Scoring& how, const std::string& who);

}  // namespace kvreplay
