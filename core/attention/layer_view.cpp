#include "attention/layer_view.h"

#include <algorithm>
#include <chrono>

#include "positions.h"

namespace kvreplay {
LayerView::LayerView(Backend& backend, const LayerTensors& tensors, LayerPlace place,
                     std::span<const std::int32_t> eval_queries)
    : backend_(backend), tensors_(tensors), place_(place), eval_queries_(eval_queries) {}

template <class Compute>
const Matrix& LayerView::remember(std::string_view observable, double argument, Compute compute) const {
  const auto key = std::pair{observable, argument};
  const auto known = memo_.find(key);
  if (known != memo_.end()) return known->second;
  const auto begin = std::chrono::steady_clock::now();
  Matrix result = compute();
  observable_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return memo_.emplace(key, std::move(result)).first->second;
}

const Matrix& LayerView::window_attention(int window) const {
  const int rows = std::clamp(window, 0, prompt());
  return remember("window_attention", rows, [&] {
    const std::vector<std::int32_t> queries = position_range(prompt() - rows, prompt());
    return backend_.attention_sums(tensors_, {.queries = queries, .columns = prompt()});
  });
}

const Matrix& LayerView::cumulative_attention() const {
  return remember("cumulative_attention", 0, [&] {
    const std::vector<std::int32_t> queries = position_range(0, prompt());
    return backend_.attention_sums(tensors_, {.queries = queries, .columns = prompt()});
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

}  // namespace kvreplay
