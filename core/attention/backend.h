// The O(n²) work and nothing else, behind pure virtual calls: one implementation for each kind of machine.
//
// a(t,j) is the softmax over the visible keys j of query t (j <= t; j > t - W in a layer with a sliding window W; from
// the start of t's chunk on in a layer with chunks) of z(t,j) = softmax_scale <q_t, k_j>, soft-capped where the layer
// says so. Where the layer has a sink logit s_h, the sum of the softmax has exp(s_h) beside the terms of the keys, and
// a is not normalised again. Inputs are widened to float32, the row maximum is subtracted, sums over rows and keys are
// float64 or compensated, in an order that does not depend on the number of threads: the same input gives the same
// bits. Equal keys give equal results, wherever they stand.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention/interruption.h"
#include "attention/kept_set.h"
#include "matrix.h"
#include "registry.h"
#include "tensor.h"

namespace kvreplay {

/// Where a resident token is taken to stand: where it was captured, or at its slot 0, 1, 2 ... in the resident list.
enum class Positions { original, cache };

/// Column sums of attention: out[h, i] = sum over `queries` t of weight_t * a(t, key i).
struct AttentionSums {
  std::span<const std::int32_t> queries;  // positions, ascending, stored in the trace
  std::span<const double> weights = {};   // one a query; empty: 1
  /// Keys that take part, as [resident_rows, n] positions, one row for all KV heads or one for each; the softmax runs
  /// over them alone (those <= t) and the columns are they. Ascending, or in any order in which the keys that each
  /// query sees stand before those that it does not. Empty: all visible keys take part.
  std::span<const std::int32_t> resident = {};
  int resident_rows = 1;
  int columns = 0;                            // without `resident`: sums are returned for keys [0, columns)
  Positions positions = Positions::original;  // cache: key at its slot, the query at its own (it must be resident)
  bool own_key = true;                        // false: a(t,t) takes part in the softmax but not in the sums
  /// Above 0: each query that gives a key more than so many times 1 / (keys that it sees) counts as 1, others as 0, and
  /// there are no weights.
  double above_uniform = 0.0;
};

/// [first, end)
struct NumberRange {
  int first = 0;
  int end = 0;
};

/// Attention of queries one by one, each over the tokens that are resident when it attends: those up to its position
/// that no earlier query evicts. At each query all rows see the same number of tokens.
struct AttentionRows {
  std::span<const std::int32_t> queries;     // positions, ascending, stored in the trace
  std::span<const std::int32_t> tokens;      // [rows, n] ascending positions: all that are resident to some query
  std::span<const std::int32_t> evicted_at;  // [rows, n] the query after which each is evicted, -1 never
  int rows = 1;                              // one for all KV heads, or one for each
  Positions positions = Positions::original;
  /// [queries] whose attention is asked for, by their numbers among the tokens that are resident to each query; empty:
  /// that of all.
  std::span<const NumberRange> wanted = {};

  int columns() const { return static_cast<int>(tokens.size()) / rows; }
  NumberRange wanted_of(std::size_t query, int resident) const {
    return wanted.empty() ? NumberRange{0, resident} : wanted[query];
  }
};

/// Kept keys as the eval queries see them: one set for all queries, or one for each (what is resident changes with
/// time). A set covers [0, tokens()), at least up to the boundary; keys from there on are all visible, and so is t
/// itself.
using KeptSets = std::span<const KeptSet>;

/// Moments that cost more than sums of a and a² over kept keys, which always are computed.
struct MomentParts {
  bool outputs = false;    // products with the values
  bool logits = false;     // the logits are held beside their exponentials
  bool unaligned = false;  // kept keys are brought side by side
  bool vectors = false;    // outputs are given back as vectors; with `outputs`

  void add(const MomentParts& more) {
    outputs = outputs || more.outputs;
    logits = logits || more.logits;
    unaligned = unaligned || more.unaligned;
    vectors = vectors || more.vectors;
  }
  /// Whether all of `some` are among these.
  bool cover(const MomentParts& some) const {
    return (outputs || !some.outputs) && (logits || !some.logits) && (unaligned || !some.unaligned) &&
           (vectors || !some.vectors);
  }
};
/// All that are sums.
inline constexpr MomentParts all_moments{.outputs = true, .logits = true, .unaligned = true};

/// What all metrics need of one eval query t, one query head and one kept set K' (the kept keys that the set covers,
/// all keys after those, and t itself; each if visible). õ = Σ_{K'} a v / (σ + Σ_{K'} a) with the sink's share
/// σ = 1 - Σ a, o = Σ a v. Parts that were not asked for are 0.
struct Moments {
  double mass = 0;         // Σ_{K'} a
  double square = 0;       // Σ_{K'} a²
  double prompt_mass = 0;  // the same over K' ∩ [0, boundary)
  double prompt_square = 0;
  double nosink_mass = 0;  // the same over K' ∩ [sink_tokens, boundary)
  double nosink_square = 0;
  double output_square = 0;  // outputs: ‖õ‖²
  double output_dot = 0;     // <o, õ>
  double error_square = 0;   // ‖o − õ‖²
  double logit_square = 0;   // logits: Σ z² over K' ∩ [0, boundary)
  double unaligned_dot = 0;  // unaligned: Σ_i a(t, i) a(t, K'_i), K'_i the i-th kept key below the boundary
};

/// The first tokens that the `nosink` variants of the metrics leave out.
inline constexpr int sink_tokens = 4;

/// Outputs of attention, d numbers of each query head and eval query.
struct OutputVectors {
  std::vector<float> full;    // [Hq, queries, d] o
  std::vector<float> errors;  // [sets, Hq, queries, d] õ − o
};

/// full [Hq, queries] is the set that keeps everything; kept [sets, Hq, queries]. A set that keeps all visible keys has
/// the same bits as `full`, and without sink logits mass exactly 1.
struct KeptMoments {
  MomentParts parts;  // that were computed
  std::vector<Moments> full;
  std::vector<Moments> kept;
  OutputVectors outputs;  // where vectors were asked for
};

/// Two vectors over keys, one of the full attention, one of what was stored.
struct Alignment {
  double dot = 0;
  double full_square = 0;
  double stored_square = 0;
};

/// What the general comparison says of one query and head: a over all visible keys against ã, the softmax over K' of
/// whatever the store kept, written out in full.
struct Comparison {
  Alignment all;                  // a and ã over all visible keys
  Alignment prompt;               // over those below the boundary
  Alignment nosink;               // over [sink_tokens, boundary)
  Alignment logits;               // z and z̃ below the boundary, z̃ = 0 where evicted
  double l1 = 0;                  // ‖a − ã‖₁
  double mass = 0;                // Σ_{K'} a
  double full_mass = 1;           // Σ a: below 1 where there is a sink logit
  double output_full_square = 0;  // ‖o‖²
  double output_square = 0;       // ‖õ‖², õ = Σ ã ṽ
  double output_dot = 0;          // <o, õ>
  double error_square = 0;        // ‖o − õ‖²
};

/// Values that differ between queries.
class EvolvingValues {
 public:
  virtual ~EvolvingValues() = default;
  /// [T, d] the values that a query reads, until the next call. Queries ascend from call to call.
  using Reader = std::function<std::span<const float>(int query)>;
  /// Of one KV head. Readers can be used side by side.
  virtual Reader of_head(int kv_head) const = 0;
};

/// Adds the logarithm of the weight w of each token from `first` on to its logit z, for the query at a position and a
/// query head: attention is w e^z / Σ w e^z. The logit of a token that is not read is -infinity and may be left as it
/// is. Calls can be made side by side.
using LogWeights = std::function<void(int head, int query, int first, std::span<double> logits)>;

/// A kept set of a layer whose tokens a store has changed or moved, or whose tokens are weighted.
struct ChangedSet {
  const LayerTensors& stored;              // with K̃ and Ṽ for the tokens of the layer
  Positions positions;                     // where kept tokens stand
  KeptSets kept;                           // for all queries, or one for each
  const EvolvingValues* values = nullptr;  // in place of Ṽ
  const LogWeights* weights = nullptr;     // of the tokens in ã; null: 1. Not together with `values`
};

/// Of one changed set.
struct ComparedSet {
  std::vector<Comparison> comparisons;  // [Hq, queries]
  OutputVectors outputs;                // where vectors were asked for
};

/// Tokens come one by one, each after its query has attended to what is held and to itself; its attention is added to
/// the scores of all that are held, and the lowest score goes while more than `budget` are held (of equal ones the
/// higher position). Of a row's query heads the mean attention counts (Zhang et al. 2023, arXiv:2306.14048, algorithm
/// 1). Or its attention alone is the score (Oren et al. 2024, arXiv:2401.06104).
struct OnlineEviction {
  Heads heads = Heads::kv;
  int first = 0;                                // tokens [0, first) have come before
  int tokens = 0;                               // up to here they come
  std::span<const std::int32_t> resident = {};  // [H, n] ascending: what is held of them
  std::span<const double> scores = {};          // [H, n]
  bool accumulate = true;                       // false: each query's attention takes the place of the scores
  int budget = 0;
  int recent = 1;  // last tokens that never go, the newest included, 0 ... budget
  /// First tokens that are never evicted. With `recent` they must fit into the budget, as far as they are resident.
  /// Until all of them have been appended, only the newest token can be evicted.
  int sinks = 0;
  /// [tokens] what both are once a token has come, where they grow: by no more than one a token, up to `budget` and
  /// `recent`. Empty: they stand.
  std::span<const std::int32_t> budgets = {};
  std::span<const std::int32_t> recents = {};

  /// Position of the first token that can be evicted after this one has been appended.
  int first_evictable(int token) const { return std::min(sinks, token); }
  int budget_after(int token) const { return budgets.empty() ? budget : budgets[static_cast<std::size_t>(token)]; }
  int recent_after(int token) const { return recents.empty() ? recent : recents[static_cast<std::size_t>(token)]; }
};

/// Which tokens say least that others do not say. With S_ij = rint(2^30 cos(w_i, w_j)), w the keys or the values of all
/// heads of a token side by side (0 for a zero vector), R the protected tokens and D the others: while |R| < keep, the
/// token of least Add joins R, ties to the lower position (SCA, eq. 1 and algorithm 1):
///   red_i = max_{k in R, k != i} S_ik, 0 when R = {i}
///   Add(j) = sum_{i in R} max(0, S_ij - red_i) + max_{i in R} S_ij
/// Add is summed over keys and values where both are asked for.
struct RedundancyElimination {
  std::span<const std::int32_t> resident = {};  // [n] ascending positions
  Positions positions = Positions::original;    // where keys are taken to stand
  bool keys = true;
  bool values = true;
  bool most_redundant = false;  // the token of greatest Add joins instead
  int sinks = 0;                // protected: the first
  int recent = 1;               // and the last; together 1 ... keep
  int keep = 0;
};

/// What a run will ask of a layer.
struct Workload {
  int sets = 0;               // of kept_moments
  MomentParts parts = {};     // of kept_moments
  bool comparisons = false;   // compare_attention, at many queries
  int online_heads = 0;       // KV heads that a row of online_eviction holds; 0: it is not asked for
  int redundancy_tokens = 0;  // of least_redundant; 0: it is not asked for
};

/// Calls that compute attention, and working_set(), throw Error{capability} that names a property of the layer for
/// which the backend has no kernels.
class Backend {
 public:
  virtual ~Backend() = default;

  /// One line for people and for run.json: what computes, and at which SIMD level or on which device.
  virtual std::string description() const = 0;

  /// Lets the caller end long calls early.
  Interruption& interruption() { return interruption_; }

  /// Of this machine, that work between calls may take.
  virtual int threads() const { return 1; }

  /// [Hq, columns], or [Hq, n] over a resident list of n.
  virtual Matrix attention_sums(const LayerTensors& layer, const AttentionSums& what) = 0;

  /// One [Hq, n] for each query: attention_sums() of that query over the tokens that are resident to it, the `wanted`
  /// columns of it.
  virtual std::vector<Matrix> attention_rows(const LayerTensors& layer, const AttentionRows& what);

  /// Moments of every kept set at every query (positions, ascending, stored).
  virtual KeptMoments kept_moments(const LayerTensors& layer, std::span<const std::int32_t> queries, int boundary,
                                   std::span<const KeptSets> kept, MomentParts parts = all_moments) = 0;

  /// The general path, for stores that transform what they keep and for weighted tokens: each set against the full
  /// attention of the layer.
  virtual std::vector<ComparedSet> compare_sets(const LayerTensors& layer, std::span<const ChangedSet> sets,
                                                std::span<const std::int32_t> queries, int boundary, bool vectors) = 0;

  /// [Hq, queries] of one set; its outputs too where they are asked for.
  std::vector<Comparison> compare_attention(const LayerTensors& layer, const LayerTensors& stored, Positions positions,
                                            std::span<const std::int32_t> queries, int boundary, KeptSets kept,
                                            OutputVectors* outputs = nullptr);

  /// [H, tokens]: position of the query after which each token went, -1 for those that are held in the end, and for
  /// those of [0, first) that were not held in the beginning.
  virtual std::vector<std::int32_t> online_eviction(const LayerTensors& layer, const OnlineEviction& what) = 0;
  /// online_eviction() of each of `all`, which may run side by side.
  virtual std::vector<std::vector<std::int32_t>> online_evictions(const LayerTensors& layer,
                                                                  std::span<const OnlineEviction> all);

  /// [keep] numbers of the kept tokens in `resident`, ascending. Throws Error{input} if a vector is not finite.
  virtual std::vector<std::int32_t> least_redundant(const LayerTensors& layer, const RedundancyElimination& what) = 0;

  /// [heads, tokens]: p-norms of the first `tokens` rows, p >= 1. Throws Error{input} if one is not finite.
  virtual Matrix norms(const TensorView& tensor, int tokens, double p) = 0;

  /// max_{j != i} cos(w_i, w_j) for i < tokens, w_i = row i of all heads concatenated; a zero vector has cosine 0, one
  /// token alone has 0. Within 1e-6 of float64. Throws Error{input} if a vector is not finite.
  virtual std::vector<double> similarity_row_maxima(const TensorView& tensor, int tokens) = 0;

  /// Says that a layer is in use or comes next, and that its numbers stay as they are until it is let go: they may be
  /// brought to where they are needed meanwhile. `queries`: most of its queries will be read. Calls work without it.
  virtual void hold(const LayerTensors& /*layer*/, bool /*queries*/) {}
  virtual void let_go(const LayerTensors& /*layer*/) {}

  /// Bytes that such calls on such a layer need at their peak beyond the trace and their results, for planning.
  virtual std::size_t working_set(const LayerTensors& layer, const Workload& work) const = 0;

 private:
  Interruption interruption_;
};

/// Which of several devices, and how much of its memory: 0 is what is free.
struct DeviceChoice {
  int number = 0;
  std::size_t memory = 0;
};

/// Backends register by name; `threads` 0 means all. Those that use the machine's own memory ignore the choice.
struct BackendCard {
  std::string name;
  std::string summary;
  std::unique_ptr<Backend> (*make)(int threads, DeviceChoice device);
};

/// Why this machine cannot run the backend called `name` is an Error{capability}; an unknown name an Error{usage}.
std::unique_ptr<Backend> make_backend(const std::string& name, int threads, DeviceChoice device = {});

Registry<BackendCard>& backends();

struct RegisteredBackend {
  explicit RegisteredBackend(BackendCard card) { backends().add(std::move(card)); }
};

}  // namespace kvreplay
