#include "policies/scores/uses.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "observables/query_logits.h"
#include "policies/arithmetic/ranking.h"
#include "policies/arithmetic/softmax.h"

namespace kvreplay {
namespace {

/// Adds the uses of one KV head by all queries so far.
void add_uses(const LayerView& view, int kv_head, std::span<double> counts, std::span<double> last) {
  constexpr double above_uniform = 1.0 + 1e-6;
  const QueryLogits logits(view, kv_head);
  const std::span<const std::int32_t> positions = view.positions(kv_head).numbers();
  std::ranges::copy(positions, last.begin());
  std::vector<double> of_head(counts.size()), sum(counts.size());
  for (const std::int32_t query : view.last_queries(view.residents().seen)) {
    const auto end = static_cast<std::size_t>(logits.end_of_visible(query));
    const std::span<double> row = std::span(of_head).first(end);
    std::ranges::fill(sum, 0.0);
    for (int head = kv_head * view.group(); head < (kv_head + 1) * view.group(); ++head) {
      logits.of(head, query, row);
      to_softmax(row, view.tensors().sink(head));
      for (std::size_t j = 0; j < end; ++j) sum[j] += row[j];
    }
    const int lowest = view.tensors().first_visible(query);
    const auto visible = std::ranges::count_if(positions, [&](std::int32_t j) { return j >= lowest && j <= query; });
    const double least = above_uniform * view.group() / static_cast<double>(visible);
    for (std::size_t j = 0; j < end; ++j)
      if (positions[j] < query && sum[j] > least) {
        counts[j] += 1;
        last[j] = query;
      }
  }
}

/// [2 Hkv, n]: counts of all KV heads, then positions of last uses.
const Matrix& uses(const LayerView& view) {
  return view.remember("uses", {}, [&] {
    Matrix all(2 * view.kv_heads(), view.tokens());
    view.on_threads(static_cast<std::size_t>(view.kv_heads()), [&](std::size_t number) {
      const auto head = static_cast<int>(number);
      add_uses(view, head, all.row(head), all.row(view.kv_heads() + head));
    });
    return all;
  });
}

}  // namespace

Scorer last_use_score() {
  const auto score = [](const LayerView& view, const Scoring&) {
    const Matrix& all = uses(view);
    Matrix last(view.kv_heads(), view.tokens());
    std::ranges::copy(all.values().last(last.values().size()), last.values().begin());
    return last;
  };
  return {.score = score, .needs = all_queries(), .quadratic = true, .name = "last-use"};
}

Scorer use_count_score() {
  const auto score = [](const LayerView& view, const Scoring&) {
    const Matrix& all = uses(view);
    Matrix counts(view.kv_heads(), view.tokens());
    for (int head = 0; head < counts.rows(); ++head) {
      std::ranges::copy(all.row(head), counts.row(head).begin());
      break_ties(counts.row(head), all.row(view.kv_heads() + head));
    }
    return counts;
  };
  return {.score = score, .needs = all_queries(), .quadratic = true, .name = "use-count"};
}

}  // namespace kvreplay
