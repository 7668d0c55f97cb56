#include "policies/scores/prefix_attention.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "observables/query_logits.h"

namespace kvreplay {
namespace {

/// Adds weight * softmax(logits / temperature).
void add_softmax(std::span<double> sums, const HeadLogits& head, double temperature, double weight) {
  for (float& logit : head.seen()) logit /= static_cast<float>(temperature);
  head.add_softmax(weight, sums);
}

}  // namespace

const Matrix& PrefixAttention::operator()(const LayerView& view, const Scoring& how) const {
  const std::vector<std::int32_t> queries = view.last_queries(window, how.window_end);
  const double weight = 1.0 / static_cast<double>(queries.size()), weight_of_head = weight / view.group();
  const auto add_kv_head = [&](int kv_head, std::span<double> sums) {
    const QueryLogits logits(view, kv_head);
    logits.of_each(queries, [&](std::int32_t, std::span<HeadLogits> heads) {
      for (HeadLogits& head : heads) {
        head.end = std::min(head.end, static_cast<int>(sums.size()));
        head.first = std::min(head.first, head.end);
      }
      const HeadLogits& largest = heads.front();
      for (const HeadLogits& head : heads) {
        if (!group_first)
          add_softmax(sums, head, temperature, weight_of_head);
        else
          std::ranges::transform(largest.seen(), head.seen(), largest.logits + largest.first,
                                 [](float a, float b) { return std::max(a, b); });
      }
      if (group_first) add_softmax(sums, largest, temperature, weight);
    });
  };
  const std::vector<double> conditions{static_cast<double>(window), temperature, group_first ? 1.0 : 0.0,
                                       static_cast<double>(how.recent), static_cast<double>(how.window_end)};
  return view.remember("prefix_attention", conditions, [&] {
    Matrix mean(view.kv_heads(), view.tokens());
    const auto before_recent = static_cast<std::size_t>(view.tokens() - how.recent);
    view.on_threads(static_cast<std::size_t>(view.kv_heads()), [&](std::size_t number) {
      const auto kv_head = static_cast<int>(number);
      add_kv_head(kv_head, mean.row(kv_head).first(before_recent));
    });
    return mean;
  });
}

}  // namespace kvreplay
