// The engine: score all layers -> allocate -> select -> share -> moments, one layer resident at a time.
//
// A policy whose sets do not depend on other layers is selected and measured while its layer is resident. A policy that
// allocates across layers is scored in that first walk and measured in a second one. Both follow from the type of its
// allocator and from its sharing.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "attention/backend.h"
#include "observables/layer_view.h"
#include "policies/selection.h"
#include "policies/text/configured.h"
#include "trace/trace.h"

namespace kvreplay {

/// What is the same for all policies of a run over one trace.
struct Conditions {
  int boundary = 0;                        // P: tokens under compression
  std::vector<std::int32_t> eval_queries;  // positions, ascending
  std::vector<int> layers;                 // stored layers that are treated, ascending
  std::vector<int> sampled_layers = {};    // numbers of treated layers, ascending; empty: all are replayed

  /// [treated] KV heads whose queries are measured, ascending; empty: all are.
  std::vector<std::vector<int>> sampled_heads = {};

  /// Numbers of the treated layers that are replayed, ascending.
  std::vector<int> replayed_layers() const;
};

/// Which tokens metrics are taken at: "continuation", "last:N", "span:NAME", "all", "stride:K". Throws Error{usage} for
/// the text, Error{input} for a trace without such queries.
std::vector<std::int32_t> eval_queries(const Trace& trace, std::string_view text);
/// Throws what it would throw for the text alone, whatever the trace.
void check_eval(std::string_view text);

/// How many tokens are under compression: "prompt", a number of them, or "span:NAME", those up to its end (of equal
/// names the first span counts). No policy that decides once reads a query from there on. Throws as eval_queries.
int boundary(const Trace& trace, std::string_view text);
/// Throws what it would throw for the text alone, whatever the trace.
void check_boundary(std::string_view text);

/// Stored layers without a sliding window, or all with `treat_sliding`. Throws Error{input} when none is left.
std::vector<int> treated_layers(const Trace& trace, bool treat_sliding);

/// The question that ends the tokens under compression: the last span of that kind that ends below the boundary, with
/// no more than a chat template's few tokens after it.
MarkedQuestion marked_question(const Trace& trace, int boundary);

/// A policy at a budget.
struct Cell {
  ConfiguredPolicy policy;
  int budget = 0;      // tokens; a budget of P or more keeps everything
  double of_seen = 0;  // the budget is this share of the tokens seen so far, `budget` of P; 0: it stands
  std::vector<LayerSelection> known = {};            // [L] from an earlier run, or empty: to be made
  std::optional<MomentParts> measure = all_moments;  // wanted moments; none: the cell is not measured
  std::uint64_t checked_at = 0;  // any number: says at which query, in which head and layer, cross_checked hears of it
};

/// What the scores of a layer depend on: name of the scorer, and the numbers of Scoring that it reads. Of scorers with
/// a name, equal keys mean equal scores.
using ScoreKey = std::tuple<std::string, Heads, Aggregate, int, int, int, int, int>;

ScoreKey score_key(const Plan& plan, const Scoring& how);

/// Seconds of one cell in one layer, shared observables apart. Scores that cells share count in full for each of them,
/// and so does what is copied from a cell of equal sets.
struct CellSeconds {
  double score = 0;
  double select = 0;
};

/// Receives results layer by layer. Calls come from one thread.
class Sink {
 public:
  virtual ~Sink() = default;
  /// Once a treated layer, ascending, before anything else of it. Trace-wide observables are computed here.
  virtual void layer(const LayerView&, Backend&) {}
  /// A cell that cannot go on: nothing more is heard of it.
  virtual void failed(int /*cell*/, const Error&) {}
  /// Once for each cell and layer that is scored, before its selection: [H, P].
  virtual void scored(const LayerView&, int /*cell*/, const Matrix& /*scores*/) {}
  /// Once for each cell and layer. `stored`: what a store that changes tokens gives back; null: they are as they were.
  virtual void selected(const LayerView&, int /*cell*/, const LayerSelection&, const StoredLayer* /*stored*/,
                        const CellSeconds&) {}
  /// Of cells whose store changes kept tokens or moves them, before `measured` of the same block: [Hq, count].
  virtual void compared(const LayerView&, int /*cell*/, int /*first*/, int /*count*/, std::span<const Comparison>) {}
  /// Moments of some cells at a block of eval queries, [first, first + count) of Conditions::eval_queries:
  /// `moments.kept` is [cells, Hq, count], 0 for heads that are not measured, and the outputs of cells that were
  /// `compared` are the comparison's. `moments` lives until the block has been cross-checked.
  virtual void measured(const LayerView&, std::span<const int> /*cells*/, int /*first*/, int /*count*/,
                        const KeptMoments&) {}
  /// Of the other cells at one query of the block that `measured` heard last (index into eval_queries) and one query
  /// head: the general comparison, to hold against the moments.
  virtual void cross_checked(const LayerView&, int /*cell*/, int /*query*/, int /*head*/, const Comparison&) {}
  /// After all cells of a treated layer in a walk. `walk` counts from 0, `walks` is 1 or 2.
  virtual void layer_done(const LayerView&, int /*walk*/, int /*walks*/) {}
};

/// Positions of the queries that the policy reads to choose, ascending; those at which it is measured come besides.
std::vector<std::int32_t> queries_read(const Trace& trace, const Conditions& conditions, const ConfiguredPolicy& policy,
                                       int budget);

/// Throws Error{input} when the trace lacks queries or RoPE data that the policy reads, Error{usage} when a value or
/// the budget (tokens, or a share of those seen: as in Cell) does not fit it.
void check_policy(const Trace& trace, const Conditions& conditions, const ConfiguredPolicy& policy, int budget,
                  double of_seen = 0);

/// Bytes that keys and values of a number of tokens take in every row of every treated layer, as the policy stores
/// them: what a budget of this number of tokens takes. Throws Error{usage} for a policy with a budget whose store has
/// no such number.
BytesOfTokens bytes_of_tokens(const Trace& trace, const Conditions& conditions, const ConfiguredPolicy& policy);

/// Whether the policy would choose, but sinks and recent tokens take all that it may hold.
bool protected_tokens_fill_budget(const Trace& trace, const Conditions& conditions, const ConfiguredPolicy& policy,
                                  int budget);

/// What the policy uses where it needs a marked question and the trace has none, as the end of a warning. Empty: it
/// needs none, or has one.
std::string without_question(const Trace& trace, const Conditions& conditions, const ConfiguredPolicy& policy);

/// Replays one trace; of sampled layers only these, which no cell's policy may combine with others
/// (why_no_sample_of_layers in sample.h). A cell whose policy throws, or fails a check of its selection, fails alone.
/// Throws what concerns all of them; Error{interrupted} when `interrupted` (polled between layers, steps of a schedule
/// and query blocks) answers true. `store`: where observables of whole prompts are read from and kept; null: nowhere.
void replay(Backend& backend, const Trace& trace, const Conditions& conditions, std::span<const Cell> cells, Sink& sink,
            const std::function<bool()>& interrupted = {}, ObservableStore* store = nullptr);

}  // namespace kvreplay
