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

const Matrix& PrefixAttention::operator()(const LayerView& view, const Scoring& how) const {
  const std::vector<std::int32_t> queries = view.last_queries(window, how.window_end);
  const auto group = static_cast<std::size_t>(view.group());
  const double weight = 1.0 / static_cast<double>(queries.size()), weight_of_head = weight / view.group();
  const auto add_kv_head = [&](int kv_head, std::span<double> sums) {
    const QueryLogits logits(view, kv_head);
    const std::size_t n = sums.size();
    std::vector<double> of_group(group * QueryLogits::at_once * n);
    logits.in_blocks(queries, [&](std::span<const std::int32_t> some, std::size_t) {
      const auto of_head = [&](std::size_t member) {
        return std::span(of_group).subspan(member * some.size() * n, some.size() * n);
      };
      for (std::size_t member = 0; member < group; ++member)
        logits.of_each(kv_head * view.group() + static_cast<int>(member), some, of_head(member));
      for (std::size_t i = 0; i < some.size(); ++i) {
        const std::span<double> largest = of_head(0).subspan(i * n, n);
        for (std::size_t member = 0; member < group; ++member) {
          const std::span<double> one = of_head(member).subspan(i * n, n);
          if (!group_first)
            add_softmax(sums, one, temperature, weight_of_head);
          else
            std::ranges::transform(largest, one, largest.begin(), [](double a, double b) { return std::max(a, b); });
        }
        if (group_first) add_softmax(sums, largest, temperature, weight);
      }
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
