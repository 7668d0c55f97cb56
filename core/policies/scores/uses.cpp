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
  std::vector<double> of_head(QueryLogits::at_once * counts.size()), sums(of_head.size());
  logits.in_blocks(queries, [&](std::span<const std::int32_t> some, std::size_t width) {
    std::ranges::fill(sums, 0.0);
    for (int head = kv_head * view.group(); head < (kv_head + 1) * view.group(); ++head) {
      const std::span<double> rows = std::span(of_head).first(some.size() * width);
      logits.of_each(head, some, rows);
      for (std::size_t i = 0; i < some.size(); ++i)
        to_softmax(rows.subspan(i * width, width), view.tensors().sink(head));
      for (std::size_t j = 0; j < rows.size(); ++j) sums[j] += rows[j];
    }
    for (std::size_t i = 0; i < some.size(); ++i) {
      const std::int32_t query = some[i];
      const int end = logits.end_of_visible(query),
                begin = logits.end_of_visible(view.tensors().first_visible(query) - 1);
      const std::span sum = std::span(sums).subspan(i * width, static_cast<std::size_t>(end));
      const double least = above_uniform * view.group() / static_cast<double>(end - begin);
      for (std::size_t j = 0; j < sum.size(); ++j)
        if (positions[j] < query && sum[j] > least) {
          counts[j] += 1;
          last[j] = query;
        }
    }
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
