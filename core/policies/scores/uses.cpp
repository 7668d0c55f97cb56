#include "policies/scores/uses.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "observables/query_logits.h"
#include "observables/softmax.h"
#include "policies/arithmetic/ranking.h"

namespace kvreplay {
namespace {

/// Counts the uses of one KV head by some queries, ascending, and sets the last of them.
void add_uses(const LayerView& view, const QueryLogits& logits, int kv_head, std::span<const std::int32_t> queries,
              std::span<double> counts, std::span<double> last) {
  constexpr double above_uniform = 1.0 + 1e-6;
  const std::span<const std::int32_t> positions = view.positions(kv_head).numbers();
  std::vector<double> sums(counts.size());  // over the group
  logits.of_each(queries, [&](std::int32_t query, std::span<const HeadLogits> heads) {
    const auto first = static_cast<std::size_t>(heads.front().first), end = static_cast<std::size_t>(heads.front().end);
    std::fill(sums.begin() + heads.front().first, sums.begin() + heads.front().end, 0.0);
    for (const HeadLogits& head : heads) head.add_softmax(1, sums, view.tensors().sink(head.head));
    for (std::size_t j = end; j-- > first;)
      if (positions[j] == query) {
        sums[j] = 0;  // its own key
        break;
      }
    const double least = above_uniform * view.group() / static_cast<double>(end - first);
    count_above(std::span(sums).subspan(first, end - first), least, query, counts.subspan(first), last.subspan(first));
  });
}

/// [2 Hkv, n]: counts of all KV heads, then positions of last uses.
const Matrix& uses(const LayerView& view) {
  return view.remember("uses", {}, [&] {
    constexpr std::size_t block = 256;  // queries of a piece of work
    const std::vector<std::int32_t> queries = view.last_queries(view.residents().seen);
    const std::size_t blocks = (queries.size() + block - 1) / block;
    Matrix all(2 * view.kv_heads(), view.tokens());
    for (int head = 0; head < view.kv_heads(); ++head) {
      const QueryLogits logits(view, head);
      const std::span<double> counts = all.row(head), last = all.row(view.kv_heads() + head);
      std::ranges::copy(view.positions(head).numbers(), last.begin());
      std::mutex adding;
      view.on_threads(blocks, [&](std::size_t number) {
        std::vector<double> of_block(counts.size()), last_of_block(last.size());
        const std::size_t begin = number * block;
        add_uses(view, logits, head, std::span(queries).subspan(begin, std::min(block, queries.size() - begin)),
                 of_block, last_of_block);
        const std::lock_guard lock(adding);  // counts are whole numbers, so that the order does not matter
        for (std::size_t j = 0; j < counts.size(); ++j) {
          counts[j] += of_block[j];
          last[j] = std::max(last[j], last_of_block[j]);
        }
      });
    }
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
