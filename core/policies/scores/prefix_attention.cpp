#include "policies/scores/prefix_attention.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "observables/query_logits.h"
#include "observables/softmax.h"

namespace kvreplay {
namespace {

/// Adds weight * softmax(logits / temperature).
void add_softmax(std::span<double> sums, std::span<double> logits, double temperature, double weight) {
  for (double& logit : logits) logit /= temperature;
  to_softmax(logits);
  for (std::size_t j = 0; j < sums.size(); ++j) sums[j] += weight * logits[j];
}

}  // namespace

Matrix PrefixAttention::operator()(const LayerView& view, const Scoring& how) const {
  const std::vector<std::int32_t> queries = view.last_queries(window, how.window_end);
  const int group = view.group();
  const double weight = 1.0 / static_cast<double>(queries.size()), weight_of_head = weight / group;
  Matrix mean(view.kv_heads(), view.tokens());
  const auto of_kv_head = [&](std::size_t number) {
    const auto kv_head = static_cast<int>(number);
    const QueryLogits logits(view, kv_head);
    const std::span<double> row = mean.row(kv_head).first(static_cast<std::size_t>(view.tokens() - how.recent));
    std::vector<double> of_head(row.size()), largest(row.size());
    for (const std::int32_t query : queries) {
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        logits.of(head, query, of_head);
        if (!group_first)
          add_softmax(row, of_head, temperature, weight_of_head);
        else if (head == kv_head * group)
          largest = of_head;
        else
          std::ranges::transform(largest, of_head, largest.begin(), [](double a, double b) { return std::max(a, b); });
      }
      if (group_first) add_softmax(row, largest, temperature, weight);
    }
  };
  return view.in_this_layer([&] {
    view.on_threads(static_cast<std::size_t>(view.kv_heads()), of_kv_head);
    return std::move(mean);
  });
}

}  // namespace kvreplay
