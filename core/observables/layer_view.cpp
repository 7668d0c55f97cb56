#include "observables/layer_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "attention/participants.h"
#include "error.h"
#include "float_types.h"
#include "observables/page_bounds.h"
#include "observables/principal_direction.h"
#include "observables/projected_norms.h"
#include "parallel.h"
#include "positions.h"

namespace kvreplay {
namespace {

Residents all_of(int prompt) {
  return {.positions = position_range(0, prompt), .rows = 1, .seen = prompt, .added = prompt};
}

void read_finite_row(const TensorView& tensor, int head, int row, std::span<double> vector) {
  read_row(tensor, head, row, vector);
  if (!std::ranges::all_of(vector, [](double number) { return std::isfinite(number); }))
    throw Error{Refusal::input, "statistics", "vectors", "finite numbers", "others"};
}

/// The rows that row_of(head, i) names for i < count, as a tensor of their own.
template <class RowOf>
TensorView gathered(const TensorView& tensor, int count, RowOf row_of, std::vector<std::byte>& rows) {
  rows.clear();
  for (int head = 0; head < tensor.heads; ++head)
    for (int i = 0; i < count; ++i) {
      const std::byte* row = tensor.row(head, row_of(head, i));
      rows.insert(rows.end(), row, row + tensor.row_bytes());
    }
  return {rows.data(), tensor.dtype, tensor.heads, count, tensor.dim};
}

}  // namespace

LayerView::LayerView(Backend& backend, const LayerTensors& tensors, LayerPlace place,
                     std::span<const std::int32_t> eval_queries, ObservableStore* store)
    : backend_(backend),
      tensors_(tensors),
      place_(place),
      eval_queries_(eval_queries),
      residents_(all_of(place.prompt)),
      store_(store) {}

LayerView::LayerView(const LayerView& whole, Residents residents)
    : backend_(whole.backend_),
      tensors_(whole.tensors_),
      place_(whole.place_),
      eval_queries_(whole.eval_queries_),
      whole_(&whole.whole()),
      residents_(std::move(residents)) {}

ResidentPositions LayerView::positions(int row) const {
  const auto count = static_cast<std::size_t>(tokens());
  return ResidentPositions(
      std::span(residents_.positions).subspan(residents_.rows == 1 ? 0 : static_cast<std::size_t>(row) * count, count));
}

const LayerView& LayerView::tokens_between(int first, int last) const {
  std::unique_ptr<LayerView>& made = between_[{first, last}];
  if (!made)
    made = std::make_unique<LayerView>(
        *this, Residents{.positions = position_range(first, last), .seen = prompt(), .added = last - first});
  return *made;
}

double LayerView::observable_seconds() const {
  double seconds = observable_seconds_;
  for (const auto& [range, view] : between_) seconds += view->observable_seconds();
  return seconds;
}

void LayerView::on_threads(std::size_t count, const std::function<void(std::size_t)>& work) const {
  all_side_by_side(backend_.threads(), count, work);
}

/// What the backend refuses has a place.
template <class Compute>
auto LayerView::in_this_layer(Compute compute) const {
  try {
    return compute();
  } catch (const Error& error) {
    if (error.refusal() != Refusal::input) throw;
    throw Error{Refusal::input, fmt::format("/layers/{:03}", stored_layer()),
                fmt::format("{}: {} (kvreplay validate --deep says more)", error.where(), error.problem()),
                error.expected(), error.found()};
  }
}

template <class Result, class Compute>
const Result& LayerView::remember(Memo<Result>& memo, std::string_view observable, Arguments arguments,
                                  Compute compute) const {
  const auto key = std::pair{observable, std::move(arguments)};
  const auto known = memo.find(key);
  if (known != memo.end()) return known->second;
  const auto begin = std::chrono::steady_clock::now();
  Result result = in_this_layer(compute);
  observable_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return memo.emplace(key, std::move(result)).first->second;
}

template <class Compute>
const Matrix& LayerView::remember_stored(std::string_view observable, int rows, Compute compute) const {
  return remember(memo_, observable, {}, [&] {
    if (store_ == nullptr) return compute();
    if (std::optional<Matrix> known = store_->find(observable, stored_layer(), rows, prompt()))
      return *std::move(known);
    Matrix made = compute();
    store_->keep(observable, stored_layer(), made);
    return made;
  });
}

Matrix LayerView::sums(std::span<const std::int32_t> queries, std::span<const double> weights,
                       double above_uniform) const {
  AttentionSums what{.queries = queries, .weights = weights, .columns = tokens(), .above_uniform = above_uniform};
  if (whole_ != nullptr) {
    what.resident = residents_.positions;
    what.resident_rows = residents_.rows;
    what.positions = residents_.place;
  }
  return backend_.attention_sums(tensors_, what);
}

bool LayerView::is_resident(std::int32_t position) const {
  for (int row = 0; row < residents_.rows; ++row) {
    const std::span<const std::int32_t> list = positions(row).numbers();
    if (std::ranges::find(list, position) == list.end()) return false;
  }
  return true;
}

/// The last `window` queries before `end`; of cache positions only the resident ones.
std::vector<std::int32_t> LayerView::last_queries(int window, int end) const {
  const int last = end_of_window(end);
  std::vector<std::int32_t> queries = position_range(last - std::clamp(window, 0, last), last);
  if (residents_.place == Positions::cache)
    std::erase_if(queries, [this](std::int32_t position) { return !is_resident(position); });
  return queries;
}

const Matrix& LayerView::window_attention(int window, int end) const {
  const double last = end_of_window(end), queries = std::clamp<double>(window, 0, last);
  return remember(memo_, "window_attention", {queries, last}, [&] { return sums(last_queries(window, end), {}); });
}

const Matrix& LayerView::window_counts(int window, int end) const {
  constexpr double above_uniform = 1.0 + 1e-6;  // a row of equal logits gives nobody more than its share
  const double last = end_of_window(end), queries = std::clamp<double>(window, 0, last);
  return remember(memo_, "window_counts", {queries, last},
                  [&] { return sums(last_queries(window, end), {}, above_uniform); });
}

Matrix LayerView::window_attention(std::span<const double> weights, int end) const {
  const std::vector<std::int32_t> queries = last_queries(static_cast<int>(weights.size()), end);
  std::vector<double> of_queries;
  for (const std::int32_t position : queries) {
    const std::size_t from_end = static_cast<std::size_t>(end_of_window(end) - position);
    of_queries.push_back(weights[weights.size() - from_end]);
  }
  return sums(queries, of_queries);
}

Matrix LayerView::window_attention_over_all(std::span<const double> weights, int end) const {
  const std::vector<std::int32_t> queries = position_range(
      end_of_window(end) - std::min(static_cast<int>(weights.size()), end_of_window(end)), end_of_window(end));
  return backend_.attention_sums(
      tensors_, {.queries = queries, .weights = weights.last(queries.size()), .columns = residents_.seen});
}

void LayerView::each_row_of_window(int window, const std::function<void(const Matrix&)>& read, int end) const {
  for (const std::int32_t query : last_queries(window, end)) read(sums({&query, 1}, {}));
}

Matrix LayerView::attention_of(std::span<const std::int32_t> queries, std::span<const double> weights) const {
  std::vector<std::int32_t> lists;
  for (int row = 0; row < residents_.rows; ++row) {
    const std::span<const std::int32_t> held = positions(row).numbers();
    lists.insert(lists.end(), held.begin(), held.end());
    lists.insert(lists.end(), queries.begin(), queries.end());
  }
  return backend_.attention_sums(tensors_, {.queries = queries,
                                            .weights = weights,
                                            .resident = lists,
                                            .resident_rows = residents_.rows,
                                            .positions = residents_.place});
}

const Matrix& LayerView::cumulative_attention() const {
  return remember_stored("cumulative_attention", query_heads(), [&] {
    const std::vector<std::int32_t> queries = position_range(residents_.seen - residents_.added, residents_.seen);
    Matrix all = sums(queries, {});
    const Matrix& before = residents_.attention_before;
    for (int head = 0; head < before.rows(); ++head)
      for (int i = 0; i < before.columns(); ++i) all(head, i) += before(head, i);
    return all;
  });
}

const Matrix& LayerView::eval_attention() const {
  return remember(memo_, "eval_attention", {}, [&] {
    return backend_.attention_sums(tensors_, {.queries = eval_queries_, .columns = prompt(), .own_key = false});
  });
}

const Matrix& LayerView::norms(std::string_view observable, const TensorView& tensor, double p) const {
  return remember(memo_, observable, {p}, [&] {
    if (whole_ == nullptr) return backend_.norms(tensor, prompt(), p);
    const double all = tensor.tokens;
    const Matrix& of_all =
        whole_->remember(whole_->memo_, observable, {p, all}, [&] { return backend_.norms(tensor, tensor.tokens, p); });
    Matrix held(tensor.heads, tokens());
    for (int head = 0; head < held.rows(); ++head)
      for (int i = 0; i < held.columns(); ++i) held(head, i) = of_all(head, positions(head)[i].number);
    return held;
  });
}

const Matrix& LayerView::key_norms(double p) const { return norms("key_norms", tensors_.k, p); }

const Matrix& LayerView::value_norms(double p) const { return norms("value_norms", tensors_.v, p); }

const Matrix& LayerView::squared_key_norms() const {
  return remember(memo_, "squared_key_norms", {},
                  [&] { return squared_lengths(as_stored(tensors_.k), backend_.threads()); });
}

const Matrix& LayerView::squared_value_norms() const {
  return remember(memo_, "squared_value_norms", {},
                  [&] { return squared_lengths(as_stored(tensors_.v), backend_.threads()); });
}

Vectors LayerView::keys() const {
  const auto read = [this](int head, int i, std::span<double> vector) {
    const std::int32_t position = positions(head)[i].number;
    read_finite_row(tensors_.k, head, position, vector);
    if (residents_.place == Positions::cache) rotate(tensors_.rope, i - position, vector);
  };
  return {tensors_.k.heads, tokens(), tensors_.k.dim, read};
}

Vectors LayerView::as_stored(const TensorView& tensor) const {
  const auto read = [this, &tensor](int head, int i, std::span<double> vector) {
    read_finite_row(tensor, head, positions(head)[i].number, vector);
  };
  return {tensor.heads, tokens(), tensor.dim, read};
}

const BackwardRotation& LayerView::backward_rotation() const {
  if (tensors_.rope.inv_freq.empty())
    throw Error{Refusal::input, "rope", "keys and queries cannot be un-rotated", "the model's RoPE", "none"};
  std::optional<BackwardRotation>& made = whole().backward_rotation_;
  if (!made) made.emplace(tensors_.rope, tensors_.k.tokens - 1);
  return *made;
}

Vectors LayerView::unrotated_keys() const {
  const auto read = [this, &back = backward_rotation()](int head, int i, std::span<double> vector) {
    const std::int32_t position = positions(head)[i].number;
    read_finite_row(tensors_.k, head, position, vector);
    back.apply(-position, vector);
    for (double& number : vector) number /= tensors_.rope.attention_scaling;
  };
  return {tensors_.k.heads, tokens(), tensors_.k.dim, read};
}

Vectors LayerView::unrotated_queries(int first) const {
  const auto read = [this, first, &back = backward_rotation()](int head, int i, std::span<double> vector) {
    read_finite_row(tensors_.q, head, stored_query(tensors_, first + i), vector);
    back.apply(-(first + i), vector);
    for (double& number : vector) number /= tensors_.rope.attention_scaling;
  };
  return {tensors_.q.heads, std::max(0, residents_.seen - first), tensors_.q.dim, read};
}

const Matrix& LayerView::key_anchor() const {
  return remember(memo_, "key_anchor", {}, [&] { return mean_direction(keys(), backend_.threads()); });
}

const Matrix& LayerView::anchor_cosines() const {
  const Matrix& anchor = key_anchor();
  return remember(memo_, "anchor_cosines", {}, [&] { return cosines(keys(), anchor, backend_.threads()); });
}

const Matrix& LayerView::key_lag_deviations(int first, int lag) const {
  return remember(memo_, "key_lag_deviations", {static_cast<double>(first), static_cast<double>(lag)},
                  [&] { return lag_deviations(keys(), first, lag, backend_.threads()); });
}

const Matrix& LayerView::value_lag_deviations(int first, int lag) const {
  return remember(memo_, "value_lag_deviations", {static_cast<double>(first), static_cast<double>(lag)},
                  [&] { return lag_deviations(as_stored(tensors_.v), first, lag, backend_.threads()); });
}

const VectorMoments& LayerView::query_moments(int first) const {
  return remember(moments_, "query_moments", {static_cast<double>(first)},
                  [&] { return moments_of(unrotated_queries(first), backend_.threads()); });
}

const VectorMoments& LayerView::key_moments() const {
  return remember(moments_, "key_moments", {}, [&] { return moments_of(unrotated_keys(), backend_.threads()); });
}

Matrix LayerView::key_forms(const QuadraticForms& forms) const {
  return in_this_layer([&] { return values_of(forms, keys(), backend_.threads()); });
}

Matrix LayerView::unrotated_key_forms(const QuadraticForms& forms) const {
  return in_this_layer([&] { return values_of(forms, unrotated_keys(), backend_.threads()); });
}

/// A block is a layer of its own, whose queries come after all of its keys.
const Matrix& LayerView::block_attention(int block) const {
  return remember(memo_, "block_attention", {static_cast<double>(block)}, [&] {
    Matrix sums(query_heads(), tokens());
    std::vector<std::byte> queries, keys;
    for (int first = 0; first < tokens(); first += block) {
      const int count = std::min(block, tokens() - first);
      const std::vector<std::int32_t> before = position_range(0, count), after = position_range(count, 2 * count);
      const auto key = [&](int head, int i) { return positions(head)[first + i].number; };
      const auto query = [&](int head, int i) { return stored_query(tensors_, key(head / group(), i)); };
      LayerTensors of_block;
      of_block.q = gathered(tensors_.q, count, query, queries);
      of_block.k = of_block.v = gathered(tensors_.k, count, key, keys);
      of_block.query_positions = after;
      const Matrix of_heads = backend_.attention_sums(of_block, {.queries = after, .resident = before});
      for (int head = 0; head < query_heads(); ++head)
        std::ranges::copy(of_heads.row(head), sums.row(head).begin() + first);
    }
    return sums;
  });
}

Matrix LayerView::distances_from_mean_value(const Matrix& weights) const {
  return in_this_layer([&] { return distances_from_mean(as_stored(tensors_.v), weights, backend_.threads()); });
}

const Matrix& LayerView::query_squares(int window) const {
  const int count = std::clamp(window, 0, residents_.seen);
  return remember(memo_, "query_squares", {static_cast<double>(count)}, [&] {
    const TensorView& q = tensors_.q;
    Matrix squares(q.heads, q.dim);
    for (std::int32_t position = residents_.seen - count; position < residents_.seen; ++position) {
      const int stored = stored_query(tensors_, position);
      for (int head = 0; head < q.heads; ++head)
        for (int c = 0; c < q.dim; ++c) {
          const double x = load(q.row(head, stored), q.dtype, static_cast<std::size_t>(c));
          squares(head, c) += x * x;
        }
    }
    return squares;
  });
}

const Matrix& LayerView::query_directions() const {
  return remember(memo_, "query_directions", {}, [&] {
    return principal_directions(tensors_, position_range(0, residents_.seen), backend_.threads());
  });
}

const Matrix& LayerView::page_bounds(int page) const {
  return remember(memo_, "page_bounds", {static_cast<double>(page)},
                  [&] { return kvreplay::page_bounds(tensors_.k, prompt(), page, backend_.threads()); });
}

const Matrix& LayerView::projected_value_norms() const {
  return remember(memo_, "projected_value_norms", {}, [&] {
    return projected_norms(tensors_.v, place_.projection, group(), prompt(), backend_.threads());
  });
}

const Matrix& LayerView::similarity(std::string_view observable, const TensorView& tensor) const {
  return remember_stored(observable, 1, [&] {
    Matrix maxima(1, prompt());
    // Rounding lets equal vectors be more than alike.
    std::ranges::transform(backend_.similarity_row_maxima(tensor, prompt()), maxima.row(0).begin(),
                           [](double cosine) { return std::clamp(cosine, -1.0, 1.0); });
    return maxima;
  });
}

const Matrix& LayerView::key_similarity() const { return similarity("key_similarity", tensors_.k); }

const Matrix& LayerView::value_similarity() const { return similarity("value_similarity", tensors_.v); }

}  // namespace kvreplay
