// A plan: what a policy is made of. Who scores, what stays by rule, who selects, how the budget is divided, which
// layers share, when it happens, and what is kept of a kept token.
//
// P is the number of tokens under compression, H the rows of the policy's granularity (KV heads, query heads, or 1 for
// the layer), B the budget: tokens kept per layer and head on average. n is the number of tokens that are resident when
// a policy is asked: P, or fewer.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/kept_set.h"
#include "matrix.h"
#include "observables/layer_view.h"
#include "policies/allocator.h"
#include "policies/grouping.h"
#include "policies/needs.h"
#include "policies/properties.h"
#include "policies/protection.h"
#include "policies/schedule.h"
#include "policies/store.h"

namespace kvreplay {

/// Arguments of a scorer beside the layer. Those that it does not read keep their defaults.
struct Scoring {
  Grouping grouping = {};
  int recent = 0;                      // last tokens that are protected at this budget
  int budget = 0;                      // B
  int sinks = 0;                       // first tokens that are protected
  int observing = 0;                   // last tokens whose queries score, where the budget says how many
  int window_end = LayerView::newest;  // position behind the observation window
};

/// What the attention of each next query does to scores, token by token: how schedule=online goes on with them.
enum class OnlineScore {
  none,   // they do not follow from it
  sum,    // it is added
  newest  // it takes their place
};

/// How important each resident token is: [H, n], larger stays.
struct Scorer {
  std::function<Matrix(const LayerView&, const Scoring&)> score = {};
  Needs needs = {};
  bool accumulates = false;  // reads the attention received so far, of queries that saw what has gone since, too
  OnlineScore online = OnlineScore::none;
  bool reads_recent = false;   // Scoring::recent
  bool reads_budget = false;   // Scoring::budget
  bool reads_sinks = false;    // Scoring::sinks
  bool places_window = false;  // scores by an observation window that ends at Scoring::window_end
  bool of_prompt = false;      // all of the prompt must be resident
  bool quadratic = false;      // reads each token with every other one
  /// Of scores that are sums of attention over queries: the number of queries, or the sum of their weights, which makes
  /// means of them. Empty: the scores are not such sums.
  std::function<double(const LayerView&, const Scoring&)> queries = {};
  /// Scorers of equal names give equal scores of equal tokens, and so share them; empty: it shares with none.
  std::string name = {};

  explicit operator bool() const { return static_cast<bool>(score); }
  Requirements required() const;
};

/// One row to select from. Tokens are numbered 0 ... n-1 as they are resident.
struct Row {
  std::span<const double> scores = {};  // [n], empty without a scorer
  int tokens = 0;                       // n
  int budget = 0;                       // tokens that this row may keep: < n, but for selectors of the whole prompt
  int sinks = 0;                        // of the budget: first tokens that stay by rule
  int recent = 0;                       // and last ones
  const LayerView* view = nullptr;      // for selectors that say they read the layer; others leave it alone
  int number = 0;                       // among the rows of its layer
};

struct Selector {
  std::function<Kept(const Row&)> select = {};
  bool reads_scores = true;
  bool takes_best = false;   // the best tokens between sinks and recent ones, no other
  bool fills = true;         // exactly the budget
  bool reads_layer = false;  // `view` of a row is there, and the layer resident
  bool one_set = false;      // for all heads of a layer
  bool of_prompt = false;    // says what stays of the whole prompt, also of all of it
  /// Of a selector whose sets have a structure: the one with the largest sum of the row's scores among all that have as
  /// many tokens as the row's budget, the first and the last ones by rule among them. Empty: any set can be chosen.
  std::function<Kept(const Row&)> best = {};

  Kept operator()(const Row& row) const { return select(row); }
  Requirements required() const;
};

/// Which layers use another one's set.
struct Sharing {
  std::function<int(int layer, int layers)> source_of = {};  // empty: each layer has its own
  /// One matrix from the scores of all layers, by which the source selects; empty: it selects by its own.
  std::function<Matrix(LayerScores)> pool = {};

  bool shares() const { return static_cast<bool>(source_of); }
  bool pools() const { return static_cast<bool>(pool); }
  /// The treated layer whose set layer l of L uses, row by row.
  int source(int layer, int layers) const { return shares() ? source_of(layer, layers) : layer; }
  /// Whether some layer uses this one's set.
  bool is_source(int layer, int layers) const;
  Requirements required() const;
};

/// Whether a layer's tokens compete within the previous layer's set.
enum class Nesting {
  none,
  within_previous,  // layer l scores and selects within the set of layer l-1
  prunes_next       // layer l holds what layer l-1 left of it, and its scores decide what layer l+1 holds
};

Selector top_k();    // selectors/top_k.h
SchedulePtr once();  // schedules/schedules.h
StorePtr exact();    // stores/stores.h

/// Where the observation window ends.
enum class WindowAt {
  end,      // with the prompt
  question  // with the marked question: a chat template's tokens behind it score nothing
};

struct Plan {
  Grouping grouping = {};
  Scorer score = {};
  Protection protect = {};
  std::optional<Protection> observing = {};  // last tokens whose queries score; none: the protected ones
  WindowAt window_at = WindowAt::end;
  Selector select = top_k();
  AllocatorPtr allocate = uniform();
  Sharing share = {};
  Nesting nesting = Nesting::none;
  SchedulePtr schedule = once();
  StorePtr store = exact();
  bool own_memory = false;  // no budget binds it: the allocator says how much is held
};

/// What the scorer or the store reads.
Needs needs_of(const Plan& plan);

/// Whether slots are held against a budget: not where everything stays, where a threshold or the policy itself says how
/// much is held, or where layers prune each other by sizes of their own.
bool has_budget(const Plan& plan);
/// Whether every row keeps all of the prompt: by the plan, or because the budget is no less.
bool keeps_everything(const Plan& plan, int budget, int prompt);

/// The reason why the plan has no protected tokens, such as "keeps every token". Empty: it selects by score within a
/// budget, beside protected tokens.
std::string lacks_protection(const Plan& plan);

Decision decision_of(const Plan& plan);

/// Why the plan has no random twin, as "its kept set is dynamic"; empty: its kept set is static, decided once, within a
/// budget.
std::string why_no_twin(const Plan& plan);

/// Throws Error{usage} at `who` for parts that do not fit together, with the reason.
void check_plan(const std::string& who, const Plan& plan);

/// Throws Error{usage} at `who` unless each layer's sets depend on that layer and the budget alone: then a layer has
/// the same sets whatever policies the other layers have.
void check_layers_apart(const std::string& who, const Plan& plan);

/// The plan of the treated layers [first, first + count): the policy sees them as if they were all there are.
struct LayerPlan {
  int first = 0;
  int count = 0;
  Plan plan = {};

  int end() const { return first + count; }
  /// The treated layer whose set a layer of the range uses.
  int source_of(int layer) const { return first + plan.share.source(layer - first, count); }
  /// Whether some layer of the range uses this one's set.
  bool is_source(int layer) const { return plan.share.is_source(layer - first, count); }
  /// The layer that this one is stored with, or this one itself.
  int partner_of(int layer) const { return first + plan.store->partner(layer - first, count); }
};

/// Whether all of them hold slots against a budget.
bool have_budget(std::span<const LayerPlan> plans);

}  // namespace kvreplay
