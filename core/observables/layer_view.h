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
#include <optional>
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
#include "tensor.h"

namespace kvreplay {

/// Where a layer stands in the run.
struct LayerPlace {
  int layer = 0;                 // number among the treated layers, 0 ... layers-1
  int layers = 1;                // treated layers
  int stored_layer = 0;          // number among the layers of the trace
  int prompt = 0;                // P: tokens under compression, [0, P)
  MarkedQuestion question = {};  // that ends them
  TensorView projection = {};    // [1, hidden, Hq * d]: the layer's output projection, where a policy needs it
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

  /// The number of queries in a window of this length: at most all before `end`.
  int queries_before(int window, int end = newest) const { return std::min(window, end_of_window(end)); }
  /// [Hq, n]: Σ over the last `window` queries t that have come of a(t,j), the window's own columns included; a window
  /// longer than what has come is all of it. With part of the tokens resident the softmax is over those; of cache
  /// positions only queries that are resident take part. With `end` the window is that of the queries before this
  /// position, as if none had come after them.
  const Matrix& window_attention(int window, int end = newest) const;
  /// The same with weight weights[i] on the i-th of the last weights.size() queries.
  Matrix window_attention(std::span<const double> weights, int end = newest) const;
  /// [Hq, seen]: the same with all that the queries could see, resident or not.
  Matrix window_attention_over_all(std::span<const double> weights, int end = newest) const;
  /// The attention of each of the last `window` queries, one [Hq, n] after the other, oldest first: of all together
  /// there would be `window` times as much as of scores.
  void each_row_of_window(int window, const std::function<void(const Matrix&)>& read, int end = newest) const;
  /// [Hq, n]: how many of the last `window` queries that have come give j more than 1 + 1e-6 times the uniform share of
  /// what they see: t + 1 keys, or fewer where a window slides or part of the tokens is resident.
  const Matrix& window_counts(int window, int end = newest) const;
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
  /// [Hkv, n]: ‖k‖₂² and ‖v‖₂², without error where the numbers have few digits: squares of norms are rounded twice.
  /// Host code: one pass over what is stored.
  const Matrix& squared_key_norms() const;
  const Matrix& squared_value_norms() const;
  /// [Hq, n]: ‖Σ_i weights_i v_i − v_j‖₂, of weights [Hq, n]: how far each value is from their mean.
  Matrix distances_from_mean_value(const Matrix& weights) const;
  /// [Hq, d]: sum over the last `window` queries that have come of the square of each channel; a window longer than
  /// what has come is all of it. Host code: it reads a few rows of each head.
  const Matrix& query_squares(int window) const;
  /// [Hq, d]: first right singular vector of the queries that have come, as they are stored, of the sign that makes
  /// their mean project positively on it (principal_direction.h).
  const Matrix& query_directions() const;
  /// [Hkv, pages * 2d]: least and greatest number of each channel of the keys in each page of so many tokens of the
  /// prompt, the last of which may be short (page_bounds.h).
  const Matrix& page_bounds(int page) const;
  /// [Hq, P]: L1 norms of W_o v, W_o the query head's part of the output projection (projected_norms.h).
  const Matrix& projected_value_norms() const;
  /// [Hkv, d]: mean of k / ‖k‖, where the keys stand; a zero key counts as 0 (Park et al. 2025, arXiv:2504.15364).
  const Matrix& key_anchor() const;
  /// [Hkv, n]: cosines of the keys with it, 0 where either is zero.
  const Matrix& anchor_cosines() const;
  /// [Hkv, n]: how keys and values of each partition of `lag` tokens, counted from number `first`, vary over channels
  /// on the scale of the partition that follows (lag_deviations).
  const Matrix& key_lag_deviations(int first, int lag) const;
  const Matrix& value_lag_deviations(int first, int lag) const;
  /// Mean [Hq, d] and covariance [Hq, d * d] of the queries at positions from `first` on that have come, un-rotated:
  /// rot(q, -position) / attention_scaling.
  const VectorMoments& query_moments(int first) const;
  /// The same, [Hkv, ...], of the keys.
  const VectorMoments& key_moments() const;
  /// [rows of the forms, n] of the keys where they stand, or un-rotated.
  Matrix key_forms(const QuadraticForms& forms) const;
  Matrix unrotated_key_forms(const QuadraticForms& forms) const;
  /// [Hq, n]: column sums of softmax_j(<q_t, k_j>) without scale, softcap or order in time, inside blocks of so many
  /// resident tokens, counted from the first of them; the last block may be short. Keys and queries as they are stored.
  const Matrix& block_attention(int block) const;
  /// [1, P]: of each token of the prompt, the cosine with the other token that is most like it, over the keys or the
  /// values of all heads side by side.
  const Matrix& key_similarity() const;
  const Matrix& value_similarity() const;

  /// work(i) for all i < count, on the backend's threads and in any order: what one call writes, no other may read or
  /// write. For host code of policies; throws what a call has thrown.
  void on_threads(std::size_t count, const std::function<void(std::size_t)>& work) const;

  /// Seconds spent on observables so far: shared by all policies, so reported apart from them.
  double observable_seconds() const;

 private:
  using Arguments = std::vector<double>;
  template <class Result>
  using Memo = std::map<std::pair<std::string_view, Arguments>, Result>;

  template <class Compute>
  auto in_this_layer(Compute compute) const;
  template <class Result, class Compute>
  const Result& remember(Memo<Result>& memo, std::string_view observable, Arguments arguments, Compute compute) const;
  /// Of the whole prompt: read from the store where it is known, and put there where it had to be computed.
  template <class Compute>
  const Matrix& remember_stored(std::string_view observable, int rows, Compute compute) const;
  const Matrix& similarity(std::string_view observable, const TensorView& tensor) const;
  const Matrix& norms(std::string_view observable, const TensorView& tensor, double p) const;
  const LayerView& whole() const { return whole_ != nullptr ? *whole_ : *this; }
  Vectors keys() const;
  Vectors as_stored(const TensorView& tensor) const;
  Vectors unrotated_keys() const;
  Vectors unrotated_queries(int first) const;
  /// Of all positions of the trace.
  const BackwardRotation& backward_rotation() const;
  Matrix sums(std::span<const std::int32_t> queries, std::span<const double> weights, double above_uniform = 0) const;
  bool is_resident(std::int32_t position) const;
  std::vector<std::int32_t> last_queries(int window, int end) const;
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
  mutable std::optional<BackwardRotation> backward_rotation_;
  mutable double observable_seconds_ = 0;
};

}  // namespace kvreplay
