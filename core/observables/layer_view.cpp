#include "observables/layer_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

#include "attention/softmax_keys.h"
#include "error.h"
#include "float_types.h"
#include "parallel.h"
#include "positions.h"
#include "profile.h"

namespace kvreplay {
namespace {

Residents all_of(int prompt) {
  return {.positions = position_range(0, prompt), .rows = 1, .seen = prompt, .added = prompt};
}

void read_finite_row(const TensorView& tensor, int head, int row, std::span<double> vector) {
  read_row(tensor, head, row, vector);
  if (!std::ranges::all_of(vector, [](double number) { return std::isfinite(number); }))
    throw Error{Refusal::input, "statistics", "vectors", "finite numbers", "NaN or Inf"};
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
  backend_.interruption().require_all_done();
}

/// What the backend refuses has a place.
template <class Compute>
auto LayerView::placed(Compute compute) const {
  try {
    return compute();
  } catch (const Error& error) {
    if (error.refusal() != Refusal::input) throw;
    throw Error{Refusal::input, fmt::format("/layers/{:03}", stored_layer()),
                fmt::format("{}: {} (run kvreplay validate --deep for details)", error.where(), error.problem()),
                error.expected(), error.found()};
  }
}

template <class Result, class Compute>
const Result& LayerView::remember(Memo<Result>& memo, std::string_view observable, Arguments arguments,
                                  Compute compute) const {
  const auto key = std::pair{observable, std::move(arguments)};
  const auto known = memo.find(key);
  if (known != memo.end()) return known->second;
  const Timed timed(Work::observable, observable);
  const double before = observable_seconds_;  // what it is made of counts once
  const auto begin = std::chrono::steady_clock::now();
  Result result = placed(compute);
  observable_seconds_ = before + std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return memo.emplace(key, std::move(result)).first->second;
}

const Matrix& LayerView::remember(std::string_view observable, Arguments arguments,
                                  const std::function<Matrix()>& compute) const {
  return remember(memo_, observable, std::move(arguments), compute);
}

Matrix LayerView::in_this_layer(const std::function<Matrix()>& compute) const { return placed(compute); }

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

Matrix LayerView::attention(std::span<const std::int32_t> queries, std::span<const double> weights,
                            double above_uniform) const {
  Timed timed(Work::observable, "attention");
  timed.counts([&] { return visible_pairs(tensors_, queries, tokens()) * tensors_.q.dim; });
  AttentionSums what{.queries = queries, .weights = weights, .columns = tokens(), .above_uniform = above_uniform};
  if (!is_whole()) {
    what.resident = residents_.positions;
    what.resident_rows = residents_.rows;
    what.positions = residents_.place;
  }
  return backend_.attention_sums(tensors_, what);
}

std::vector<Matrix> LayerView::attention_rows(const AttentionRows& what) const {
  Timed timed(Work::observable, "attention_rows");
  timed.counts([&] { return visible_pairs(tensors_, what.queries, what.columns()) * tensors_.q.dim; });
  return placed([&] { return backend_.attention_rows(tensors_, what); });
}

bool LayerView::is_resident(std::int32_t position) const {
  for (int row = 0; row < residents_.rows; ++row) {
    const std::span<const std::int32_t> list = positions(row).numbers();
    if (std::ranges::find(list, position) == list.end()) return false;
  }
  return true;
}

std::vector<std::int32_t> LayerView::last_queries(int window, int end) const {
  const int last = end_of_window(end);
  std::vector<std::int32_t> queries = position_range(last - std::clamp(window, 0, last), last);
  if (residents_.place == Positions::cache)
    std::erase_if(queries, [this](std::int32_t position) { return !is_resident(position); });
  return queries;
}

const Matrix& LayerView::window_attention(int window, int end) const {
  const double last = end_of_window(end), queries = std::clamp<double>(window, 0, last);
  return remember(memo_, "window_attention", {queries, last}, [&] { return attention(last_queries(window, end), {}); });
}

Matrix LayerView::window_attention(std::span<const double> weights, int end) const {
  const std::vector<std::int32_t> queries = last_queries(static_cast<int>(weights.size()), end);
  std::vector<double> of_queries;
  for (const std::int32_t position : queries) {
    const std::size_t from_end = static_cast<std::size_t>(end_of_window(end) - position);
    of_queries.push_back(weights[weights.size() - from_end]);
  }
  return attention(queries, of_queries);
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
    Matrix all = attention(queries, {});
    const Matrix& before = residents_.attention_before;
    for (int head = 0; head < before.rows(); ++head)
      for (int i = 0; i < before.columns(); ++i) all(head, i) += before(head, i);
    return all;
  });
}

const Matrix& LayerView::eval_attention() const {
  return remember(memo_, "eval_attention", {}, [&] {
    LayerTensors keys_alone = tensors_;
    keys_alone.sinks = {};
    return backend_.attention_sums(keys_alone, {.queries = eval_queries_, .columns = prompt(), .own_key = false});
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

BackwardRotation LayerView::backward_rotation() const {
  if (tensors_.rope.inv_freq.empty())
    throw Error{Refusal::input, "rope", "RoPE of keys and queries cannot be undone",
                "the RoPE frequencies of the model", "none"};
  return {tensors_.rope, tensors_.k.tokens - 1};
}

Vectors LayerView::unrotated_keys() const {
  const auto read = [this, back = backward_rotation()](int head, int i, std::span<double> vector) {
    const std::int32_t position = positions(head)[i].number;
    read_finite_row(tensors_.k, head, position, vector);
    back.apply(-position, vector);
    for (double& number : vector) number /= tensors_.rope.attention_scaling;
  };
  return {tensors_.k.heads, tokens(), tensors_.k.dim, read};
}

Vectors LayerView::unrotated_queries(int first) const {
  const auto read = [this, first, back = backward_rotation()](int head, int i, std::span<double> vector) {
    read_finite_row(tensors_.q, head, stored_query(tensors_, first + i), vector);
    back.apply(-(first + i), vector);
    for (double& number : vector) number /= tensors_.rope.attention_scaling;
  };
  return {tensors_.q.heads, std::max(0, residents_.seen - first), tensors_.q.dim, read};
}

const VectorMoments& LayerView::query_moments(int first) const {
  return remember(moments_, "query_moments", {static_cast<double>(first)},
                  [&] { return moments_of(unrotated_queries(first), backend_.threads()); });
}

const VectorMoments& LayerView::key_moments() const {
  return remember(moments_, "key_moments", {}, [&] { return moments_of(unrotated_keys(), backend_.threads()); });
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
