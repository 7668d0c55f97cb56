// One layer as a policy sees it: the tokens that are resident, and what can be measured on them, computed once and
// shared by every policy and budget of a run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/backend.h"
#include "attention/rope.h"
#include "matrix.h"
#include "observables/observable_store.h"
#include "observables/vector_statistics.h"
#include "positions.h"
#include "reconstruction_pass.h"
#include "tensor.h"

namespace kvreplay {

/// Queries and keys of the passes that repeat the prompt.
struct Reconstruction {
  TensorView q = {};                            // [Hq, R, d]
  TensorView k = {};                            // [Hkv, R, d]
  std::vector<ReconstructionPass> passes = {};  // empty: no policy needs them
};

/// Where a layer stands in the run.
struct LayerPlace {
  int layer = 0;                 // number among the treated layers, 0 ... layers-1
  int layers = 1;                // treated layers
  int stored_layer = 0;          // number among the layers of the trace
  int prompt = 0;                // P: tokens under compression, [0, P)
  MarkedQuestion question = {};  // that ends them
  TensorView projection = {};    // [1, hidden, Hq * d]: the layer's output projection, where a policy needs it
  Reconstruction reconstruction = {};
};

/// What is held at some time, when it is not all of the prompt.
struct Residents {
  std::vector<std::int32_t> positions;  // [rows, n]; ascending, or those held before in any order and then the new ones
  int rows = 1;                         // one list for all KV heads, or one for each
  int seen = 0;                         // tokens [0, seen) have come
  int added = 0;                        // the last so many of each list are new: nothing was evicted since they came
  Positions place = Positions::original;
  Matrix attention_before = {};  // [Hq, n - added]: attention that those held before have received until the new came
};

/// Where a token stands in the prompt. Not a number: columns of a view's matrices are those of the tokens that it
/// holds.
struct Position {
  std::int32_t number = 0;
};

/// [n] positions of the tokens that a row holds, in the order of the columns of what a view measures.
class ResidentPositions {
 public:
  explicit ResidentPositions(std::span<const std::int32_t> numbers) : numbers_(numbers) {}

  /// Of the token in a column.
  Position operator[](int column) const { return {numbers_[static_cast<std::size_t>(column)]}; }
  std::span<const std::int32_t> numbers() const { return numbers_; }

 private:
  std::span<const std::int32_t> numbers_;
};

class LayerView {
 public:
  /// As the end of a window: it ends with the newest query.
  static constexpr int newest = std::numeric_limits<int>::max();

  /// All of the prompt is resident. `eval_queries`: positions at which metrics are taken, ascending. `store`: what is
  /// known of the layer already; null: nothing is. Everything must outlive the view.
  LayerView(Backend& backend, const LayerTensors& tensors, LayerPlace place, std::span<const std::int32_t> eval_queries,
            ObservableStore* store = nullptr);
  /// The same layer with less resident; `whole` must outlive the view, too.
  LayerView(const LayerView& whole, Residents residents);

  int layer() const { return place_.layer; }
  int layers() const { return place_.layers; }
  int stored_layer() const { return place_.stored_layer; }
  int prompt() const { return place_.prompt; }
  MarkedQuestion question() const { return place_.question; }
  const LayerPlace& place() const { return place_; }
  int query_heads() const { return tensors_.q.heads; }
  int kv_heads() const { return tensors_.k.heads; }
  int group() const { return tensors_.group(); }
  int rows(Heads heads) const { return rows_of(heads, query_heads(), kv_heads()); }
  const LayerTensors& tensors() const { return tensors_; }
  std::span<const std::int32_t> eval_queries() const { return eval_queries_; }
  Backend& backend() const { return backend_; }
  /// The tokens [first, last) of the prompt alone, made once, for observables of keys, of values and inside blocks.
  const LayerView& tokens_between(int first, int last) const;

  /// n: tokens that are resident.
  int tokens() const { return static_cast<int>(residents_.positions.size()) / residents_.rows; }
  /// Of a row of the policy's granularity; all rows share a list where there is one.
  ResidentPositions positions(int row) const;
  const Residents& residents() const { return residents_; }
  /// All of the prompt is resident.
  bool is_whole() const { return whole_ == nullptr; }

  /// The number of queries in a window of this length: at most all before `end`.
  int queries_before(int window, int end = newest) const { return std::min(window, end_of_window(end)); }
  /// Positions of the last `window` queries before `end`; of cache positions only of those that are resident.
  std::vector<std::int32_t> last_queries(int window, int end = newest) const;
  /// [Hq, n]: Σ over the last `window` queries t that have come of a(t,j), the window's own columns included; a window
  /// longer than what has come is all of it. With part of the tokens resident the softmax is over those; of cache
  /// positions only queries that are resident take part. With `end` the window is that of the queries before this
  /// position, as if none had come after them.
  const Matrix& window_attention(int window, int end = newest) const;
  /// The same with weight weights[i] on the i-th of the last weights.size() queries.
  Matrix window_attention(std::span<const double> weights, int end = newest) const;
  /// [Hq, n]: Σ over the queries at these positions, with weights (default: 1), of their attention to each resident
  /// token. With `above_uniform` > 0: the number of queries whose attention to the token exceeds `above_uniform` times
  /// the uniform share of the keys that they see (t + 1, fewer under a sliding window or with evicted tokens).
  Matrix attention(std::span<const std::int32_t> queries, std::span<const double> weights = {},
                   double above_uniform = 0) const;
  /// [Hq, n] of each query, over the tokens that are resident to it, whatever this view holds.
  std::vector<Matrix> attention_rows(const AttentionRows& what) const;
  /// [Hq, n + queries.size()]: Σ over the queries at positions `queries`, none of them resident, with weights, of their
  /// attention over what is resident and, after it, over themselves.
  Matrix attention_of(std::span<const std::int32_t> queries, std::span<const double> weights) const;
  /// [Hq, n]: Σ over all queries t that have come of a(t,j), each over what was resident to it; tokens that came after
  /// a query have nothing of it (Zhang et al. 2023, arXiv:2306.14048, eq. 2).
  const Matrix& cumulative_attention() const;
  /// [Hq, P]: Σ over the eval queries t, t != j, of a(t,j). What oracles see and policies must not.
  const Matrix& eval_attention() const;
  /// [Hkv, n]: p-norms of keys and of values.
  const Matrix& key_norms(double p) const;
  const Matrix& value_norms(double p) const;
  /// Mean [Hq, d] and covariance [Hq, d * d] of the queries at positions from `first` on that have come, un-rotated:
  /// rot(q, -position) / attention_scaling.
  const VectorMoments& query_moments(int first) const;
  /// The same, [Hkv, ...], of the keys.
  const VectorMoments& key_moments() const;
  /// [1, P]: of each token of the prompt, the cosine with the other token that is most like it, over the keys or the
  /// values of all heads side by side.
  const Matrix& key_similarity() const;
  const Matrix& value_similarity() const;

  /// [heads, n] vectors of the resident tokens, to be read by host code: keys where they stand, keys and values as they
  /// are stored, and rot(k, -position) / attention_scaling.
  Vectors keys() const;
  Vectors stored_keys() const { return as_stored(tensors_.k); }
  Vectors stored_values() const { return as_stored(tensors_.v); }
  Vectors unrotated_keys() const;

  using Arguments = std::vector<double>;
  /// What only one policy reads of a layer, or what takes long: computed once for the layer and these arguments, and
  /// shared by all budgets. The time counts as that of observables. `observable` is a literal.
  const Matrix& remember(std::string_view observable, Arguments arguments,
                         const std::function<Matrix()>& compute) const;
  /// What `compute` gives; an Error{input} of it names this layer.
  Matrix in_this_layer(const std::function<Matrix()>& compute) const;

  /// work(i) for all i < count, on the backend's threads and in any order: what one call writes, no other may read or
  /// write. For host code of policies; throws what a call has thrown.
  void on_threads(std::size_t count, const std::function<void(std::size_t)>& work) const;

  /// Seconds spent on observables so far: shared by all policies, so reported apart from them.
  double observable_seconds() const;

 private:
  template <class Result>
  using Memo = std::map<std::pair<std::string_view, Arguments>, Result>;

  template <class Compute>
  auto placed(Compute compute) const;
  template <class Result, class Compute>
  const Result& remember(Memo<Result>& memo, std::string_view observable, Arguments arguments, Compute compute) const;
  /// Of the whole prompt: read from the store where it is known, and put there where it had to be computed.
  template <class Compute>
  const Matrix& remember_stored(std::string_view observable, int rows, Compute compute) const;
  const Matrix& similarity(std::string_view observable, const TensorView& tensor) const;
  const Matrix& norms(std::string_view observable, const TensorView& tensor, double p) const;
  const LayerView& whole() const { return whole_ != nullptr ? *whole_ : *this; }
  Vectors as_stored(const TensorView& tensor) const;
  Vectors unrotated_queries(int first) const;
  /// Of all positions of the trace.
  BackwardRotation backward_rotation() const;
  bool is_resident(std::int32_t position) const;
  /// Position behind such a window: at most the number of tokens seen.
  int end_of_window(int end) const { return std::min(end, residents_.seen); }

  Backend& backend_;
  LayerTensors tensors_;
  LayerPlace place_;
  std::span<const std::int32_t> eval_queries_;
  const LayerView* whole_ = nullptr;  // with all of the prompt resident; null: this one
  Residents residents_;
  ObservableStore* store_ = nullptr;
  mutable Memo<Matrix> memo_;
  mutable Memo<VectorMoments> moments_;
  mutable std::map<std::pair<int, int>, std::unique_ptr<LayerView>> between_;
  mutable double observable_seconds_ = 0;
};

}  // namespace kvreplay
