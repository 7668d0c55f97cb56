// A policy is a plan made of parts: who scores, what stays by rule, who selects, how the budget is divided, which
// layers share, when it happens, and what is kept of a kept token.
//
// A policy file names only what its paper changes; every member of Plan has a default. P is the number of tokens under
// compression, H the rows of the policy's granularity (KV heads, query heads, or 1 for the layer), B the budget: tokens
// kept per layer and head on average. n is the number of tokens that are resident when a policy is asked: P, or fewer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "attention/kept_set.h"
#include "matrix.h"
#include "observables/layer_view.h"
#include "parameters.h"
#include "policies/grouping.h"
#include "policies/protection.h"
#include "policies/schedule.h"
#include "registry.h"

namespace kvreplay {

/// The file that a policy or a part comes from, where the program was built without it.
struct Source {
  std::string path = {};
  std::string hash = {};  // XXH3-128 of its bytes, in hexadecimal digits; empty: it is built in

  bool is_built_in() const { return hash.empty(); }
};

/// Of what registers itself now: the plug-in that is being loaded, or the program itself.
const Source& current_source();

/// What a policy is mainly about: the order in which all of them are listed.
enum class Family { control, rule, attention, geometry, budget, chunk, store, reading, own };

inline constexpr Choice<Family> families[] = {
    {"controls", Family::control},
    {"a rule", Family::rule},                       // positions alone
    {"attention", Family::attention},               // what queries attend to
    {"keys and values", Family::geometry},          // without any query
    {"layers and heads", Family::budget},           // how a budget is divided
    {"chunks", Family::chunk},                      // of neighbouring tokens
    {"everything, in less memory", Family::store},  // tokens changed, not only dropped
    {"everything, read in part", Family::reading},  // a set for each query
    {"of your own", Family::own},
};

inline const char* word_of(Family family) { return std::ranges::find(families, family, &Choice<Family>::value)->word; }

/// What a policy says of itself.
struct Card {
  const char* name;
  const char* summary;
  const char* paper;
  const char* score;
  Family family = Family::own;
};

/// Which captured queries the observables read. A trace that lacks them is refused before the run.
struct Needs {
  int last_queries = 0;         // the last so many of the prompt
  bool all_queries = false;     // all of the prompt
  bool future_queries = false;  // eval queries: the mark of an oracle
  bool recent_queries = false;  // those of the tokens that stay by rule at the end of the prompt
  bool question = false;        // those of the question that ends the prompt
  bool projection = false;      // no queries: the layers' output projections
  bool rope = false;            // the model's RoPE, because it un-rotates keys or queries
};

inline Needs last_queries(int window) { return {.last_queries = window}; }
inline Needs all_queries() { return {.all_queries = true}; }
inline Needs future_queries() { return {.future_queries = true}; }

/// Arguments of a scorer beside the layer. Those that it does not read keep their defaults.
struct Scoring {
  Grouping grouping = {};
  int recent = 0;                      // last tokens that are protected at this budget
  int budget = 0;                      // B
  int sinks = 0;                       // first tokens that are protected
  int observing = 0;                   // last tokens whose queries score, where the budget says how many
  int window_end = LayerView::newest;  // position behind the observation window
};

/// What the attention of each next query does to scores, token by token: how `Online` goes on with them.
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
  /// Of scores that are sums of attention over queries: the number of queries, or the sum of their weights, which makes
  /// means of them. Empty: the scores are not such sums.
  std::function<double(const LayerView&, const Scoring&)> queries = {};
  /// Scorers of equal names give equal scores of equal tokens, and so share them; empty: it shares with none.
  std::string name = {};

  explicit operator bool() const { return static_cast<bool>(score); }
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

/// Kept tokens, ascending. The first `sinks` and the last `recent` ones are there by rule, not by score.
struct Kept {
  std::vector<std::int32_t> positions;
  int sinks = 0;
  int recent = 0;
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
};

/// What is divided over layers and rows.
struct Division {
  int layers = 1;  // L
  int prompt = 0;  // P
  int budget = 0;  // B
  int sinks = 0;   // tokens that stay by rule at B
  int recent = 0;
  int rows = 1;         // H
  int query_heads = 1;  // Hq

  int by_rule() const { return sinks + recent; }
  /// M: tokens of a row that compete.
  int candidates() const { return prompt - by_rule(); }
  /// b: slots of a row that they compete for, on average.
  int slots() const { return budget - by_rule(); }
};

/// Every row of every layer gets B.
struct Uniform {};
/// Keeps all and has no budget.
struct Everything {};
/// Counts from the number of layers alone: [L], each for all rows of its layer, what stays by rule included.
using ByLayer = std::function<std::vector<int>(const Division&)>;
/// The same head by head: [L][H]. Sum at most L*H*B.
using ByHead = std::function<std::vector<std::vector<int>>(const Division&)>;
/// Counts of one layer, [H], from its scores [H, P]. Sum at most H*B.
using WithinLayer = std::function<std::vector<int>(const Division&, const Matrix& scores)>;
/// Counts of all treated layers at once, [L][H], from all layers' scores [L] of [H, P]. Sum at most L*H*B.
using AcrossLayers =
    std::function<std::vector<std::vector<int>>(const Division&, std::span<const Matrix* const> scores)>;
/// Counts of the rows of some layers, [layers][H], that sum to `slots`, from their scores, [layers] of [H, P].
using SlotDivision =
    std::function<std::vector<std::vector<int>>(std::int64_t slots, std::span<const Matrix* const> scores)>;
/// The counts and the granularity of another policy's selection.
struct CountsOf {
  std::string policy;
  bool has_budget = true;    // whether one binds that policy
  SlotDivision divide = {};  // its slots anew; none: each row has its count
  bool over_layers = false;  // `divide` those of all layers together, not of each
};

/// The kept sets of another policy's selection, each row changed: as many tokens, the protected ones among them.
struct SetsOf {
  std::string policy;
  /// Kept positions in the place of a row's. `layer` is the stored number of the layer that the set belongs to.
  std::function<std::vector<std::int32_t>(const Kept&, int prompt, int layer, int row)> change;
};

/// The type says what must be known before a layer's set is final: nothing, the layer, all layers, another policy.
using Allocator = std::variant<Uniform, Everything, ByLayer, ByHead, WithinLayer, AcrossLayers, CountsOf, SetsOf>;

/// The policy whose counts or sets it takes, as users write it; null: it takes those of none.
const std::string* policy_taken_from(const Allocator& allocate);

/// The treated layer whose set layer l of L uses, row by row.
using Sharing = std::function<int(int layer, int layers)>;

/// Whether some layer uses this one's set.
bool is_source(const Sharing& share, int layer, int layers);

/// Whether a layer's tokens compete within the previous layer's set.
enum class Nesting {
  none,
  within_previous,  // layer l scores and selects within the set of layer l-1
  prunes_next       // layer l holds what layer l-1 left of it, and its scores decide what layer l+1 holds
};

/// Keys and values as a store gives them back, for the layer's tokens [0, T); float32.
struct StoredLayer {
  std::vector<float> keys;    // [Hkv, T, d]
  std::vector<float> values;  // [Hkv, T, d]
  LayerTensors tensors;       // the layer's, with these keys and values
  double bytes = 0;           // that the kept tokens take, all heads
};

/// Kept tokens stay as they are, where they were.
struct Exact {};
/// They move to their slots 0, 1, 2 ..., and the query to its own.
struct CachePositions {};
/// The layer that another one is stored with, or that one itself where it is stored alone.
struct Partner {
  int layer = 0;  // treated
  LayerTensors tensors = {};
};

/// They are changed.
struct Transformed {
  std::function<std::unique_ptr<StoredLayer>(const LayerView&, const KeptSet&, const Partner&)> store;
  Needs needs = {};             // of the store itself
  Sharing paired_with = {};     // the treated layer that layer l of L is stored with, or l; empty: each alone
  bool has_exact_size = false;  // a kept token takes as many bytes as it does unchanged
};

using Store = std::variant<Exact, CachePositions, Transformed>;

/// What the store reads, whatever the scorer does.
Needs needs_of(const Store& store);

Selector top_k();      // parts/top_k.h
Sharing no_sharing();  // parts/sharing.h

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
  Allocator allocate = Uniform{};
  Sharing share = no_sharing();
  Nesting nesting = Nesting::none;
  Schedule schedule = Once{};
  Store store = Exact{};
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

/// When a plan's sets are decided, as a live system would have to: after an uncompressed prefill, whose queries, keys
/// and values no eviction has changed; while it runs, so that later queries and deeper layers feel the eviction; by
/// later queries, which no system has; or never, because all tokens are held.
enum class Decision { after_prefill, during_prefill, future, never };
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
};

/// A registered policy with values of its own.
class Policy {
 public:
  virtual ~Policy() = default;
  virtual const Card& card() const = 0;
  /// Declares the parameters, bound to this object.
  virtual Parameters parameters() = 0;
  /// Declares `name` where the policy has parameters that only its user can name; false: it has none.
  virtual bool declare(std::string_view /*name*/) { return false; }
  /// The default of every seed parameter of the policies that it is made of.
  virtual void set_seed(std::uint64_t) {}
  /// Where the policies that it is made of come from, and the tables that it reads: one that parses or makes others
  /// must say so, since the results of an earlier version of their files are not its own.
  virtual std::vector<Source> sources() const { return {}; }
  /// Throws Error{usage} for values that contradict each other, whatever the number of layers.
  virtual void check() const = 0;
  /// Throws Error{usage} when a policy that it is made of was given a value too large for P tokens or L layers.
  virtual void check_limits(int /*prompt*/, int /*layers*/) const {}
  /// Ascending, without gaps, for L treated layers. Throws Error{usage} where they cannot be.
  virtual std::vector<LayerPlan> plans(int layers) const = 0;
};

/// Adds the plans of `policy` for the next `layers` layers.
void append_plans(std::vector<LayerPlan>& plans, const Policy& policy, int layers);

struct PolicyEntry {
  std::string name;
  std::function<std::unique_ptr<Policy>()> make;
  Source source = current_source();
};

Registry<PolicyEntry>& policies();

/// `T` has a static `card`, `parameters(Parameters&)`, and `plan()` or, where layers differ, `plans(layers)`. Define
/// one in the policy's file.
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
    void set_seed(std::uint64_t seed) override {
      if constexpr (requires { value.set_seed(seed); }) value.set_seed(seed);
    }
    std::vector<Source> sources() const override {
      if constexpr (requires { value.sources(); })
        return value.sources();
      else
        return {};
    }
    void check() const override {
      if constexpr (requires { value.check(); })
        value.check();
      else
        plans(2);
    }
    std::vector<LayerPlan> plans(int layers) const override {
      if constexpr (requires { value.plans(layers); })
        return value.plans(layers);
      else
        return {{0, layers, value.plan()}};
    }
  };
  Registered() {
    policies().add({T::card.name, [] { return std::unique_ptr<Policy>(new Holder); }});
  }
};

}  // namespace kvreplay
