#include "attention/layer_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "error.h"
#include "positions.h"

namespace kvreplay {
namespace {

Residents all_of(int prompt) {
  return {.positions = position_range(0, prompt), .rows = 1, .seen = prompt, .added = prompt};
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
      partial_(true),
      residents_(std::move(residents)) {}

std::span<const std::int32_t> LayerView::positions(int row) const {
  const auto count = static_cast<std::size_t>(tokens());
  return std::span(residents_.positions)
      .subspan(residents_.rows == 1 ? 0 : static_cast<std::size_t>(row) * count, count);
}

/// What the backend refuses has a place.
template <class Compute>
Matrix LayerView::in_this_layer(Compute compute) const {
  try {
    return compute();
  } catch (const Error& error) {
    if (error.refusal() != Refusal::input) throw;
    throw Error{Refusal::input, fmt::format("/layers/{:03}", stored_layer()),
                fmt::format("{}: {} (kvreplay validate --deep says more)", error.where(), error.problem()),
                error.expected(), error.found()};
  }
}

template <class Compute>
const Matrix& LayerView::remember(std::string_view observable, double argument, Compute compute) const {
  const auto key = std::pair{observable, argument};
  const auto known = memo_.find(key);
  if (known != memo_.end()) return known->second;
  const auto begin = std::chrono::steady_clock::now();
  Matrix result = in_this_layer(compute);
  observable_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return memo_.emplace(key, std::move(result)).first->second;
}

template <class Compute>
const Matrix& LayerView::remember_stored(std::string_view observable, int rows, Compute compute) const {
  return remember(observable, 0, [&] {
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
  if (partial_) {
    what.resident = residents_.positions;
    what.resident_rows = residents_.rows;
    what.positions = residents_.place;
  }
  return backend_.attention_sums(tensors_, what);
}

bool LayerView::is_resident(std::int32_t position) const {
  for (int row = 0; row < residents_.rows; ++row) {
    const std::span<const std::int32_t> list = positions(row);
    if (std::ranges::find(list, position) == list.end()) return false;
  }
  return true;
}

/// Of the last `window` queries that have come, those that can take part.
std::vector<std::int32_t> LayerView::last_queries(int window) const {
  std::vector<std::int32_t> queries =
      position_range(residents_.seen - std::clamp(window, 0, residents_.seen), residents_.seen);
  if (residents_.place == Positions::cache)
    std::erase_if(queries, [this](std::int32_t position) { return !is_resident(position); });
  return queries;
}

const Matrix& LayerView::window_attention(int window) const {
  return remember("window_attention", std::clamp(window, 0, residents_.seen),
                  [&] { return sums(last_queries(window), {}); });
}

const Matrix& LayerView::window_counts(int window) const {
  constexpr double above_uniform = 1.0 + 1e-6;  // a row of equal logits gives nobody more than its share
  return remember("window_counts", std::clamp(window, 0, residents_.seen),
                  [&] { return sums(last_queries(window), {}, above_uniform); });
}

Matrix LayerView::window_attention(std::span<const double> weights) const {
  const std::vector<std::int32_t> queries = last_queries(static_cast<int>(weights.size()));
  std::vector<double> of_queries;
  for (const std::int32_t position : queries) {
    const std::size_t from_end = static_cast<std::size_t>(residents_.seen - position);
    of_queries.push_back(weights[weights.size() - from_end]);
  }
  return sums(queries, of_queries);
}

Matrix LayerView::window_attention_over_all(std::span<const double> weights) const {
  const std::vector<std::int32_t> queries =
      position_range(residents_.seen - static_cast<int>(weights.size()), residents_.seen);
  return backend_.attention_sums(tensors_, {.queries = queries, .weights = weights, .columns = residents_.seen});
}

Matrix LayerView::attention_of(std::span<const std::int32_t> queries, std::span<const double> weights) const {
  std::vector<std::int32_t> lists;
  for (int row = 0; row < residents_.rows; ++row) {
    const std::span<const std::int32_t> held = positions(row);
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
  return remember("eval_attention", 0, [&] {
    return backend_.attention_sums(tensors_, {.queries = eval_queries_, .columns = prompt(), .own_key = false});
  });
}

const Matrix& LayerView::key_norms(double p) const {
  return remember("key_norms", p, [&] { return backend_.norms(tensors_.k, prompt(), p); });
}

const Matrix& LayerView::value_norms(double p) const {
  return remember("value_norms", p, [&] { return backend_.norms(tensors_.v, prompt(), p); });
}

const Matrix& LayerView::similarity(std::string_view observable, const TensorView& tensor) const {
  return remember_stored(observable, 1, [&] {
    Matrix maxima(1, prompt());
    std::ranges::copy(backend_.similarity_row_maxima(tensor, prompt()), maxima.row(0).begin());
    return maxima;
  });
}

const Matrix& LayerView::key_similarity() const { return similarity("key_similarity", tensors_.k); }

const Matrix& LayerView::value_similarity() const { return similarity("value_similarity", tensors_.v); }

}  // namespace kvreplay
