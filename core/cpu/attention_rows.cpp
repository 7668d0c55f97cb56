// Attention of single queries over what is resident to each. Little changes from one query to the next, so the logits
// of several are computed at once over all that any of them sees; then each row brings its own side by side.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <numbers>

#include "attention/row_sums.h"
#include "cpu/cpu_backend.h"
#include "error.h"

namespace kvreplay {
namespace {

// Rows that read each packed tile of keys.
constexpr int block_rows = 48;

/// The tokens of one row of residents.
struct TokenRow {
  TokenRow(const AttentionRows& what, int row) {
    const auto count = static_cast<std::size_t>(what.columns());
    tokens = what.tokens.subspan(static_cast<std::size_t>(row) * count, count);
    evicted_at = what.evicted_at.subspan(static_cast<std::size_t>(row) * count, count);
    for (int i = 0; i < what.columns(); ++i)
      if (const std::int32_t at = evicted_at[static_cast<std::size_t>(i)]; at >= 0 && at < what.queries.back())
        leaving.push_back(i);
  }

  /// Number of the first token that stands at `position` or behind it.
  int first_from(std::int32_t position) const {
    return static_cast<int>(std::ranges::lower_bound(tokens, position) - tokens.begin());
  }
  /// use(begin, end) for runs of tokens that are resident to a query, ascending.
  template <class Use>
  void for_resident_runs(std::int32_t query, const Use& use) const {
    const int seen = first_from(query + 1);
    int begin = 0;
    for (const int i : leaving) {
      if (i >= seen) break;
      if (evicted_at[static_cast<std::size_t>(i)] >= query) continue;
      if (i > begin) use(begin, i);
      begin = i + 1;
    }
    if (seen > begin) use(begin, seen);
  }
  int resident(std::int32_t query) const {
    int count = 0;
    for_resident_runs(query, [&](int begin, int end) { count += end - begin; });
    return count;
  }
  /// Tokens resident to a query that stand before a position.
  int resident_before(std::int32_t query, std::int32_t position) const {
    const int beyond = first_from(position);
    int count = 0;
    for_resident_runs(query, [&](int begin, int end) { count += std::max(0, std::min(end, beyond) - begin); });
    return count;
  }

  std::span<const std::int32_t> tokens, evicted_at;
  std::vector<int> leaving;  // numbers of those that some query no longer sees
};

}  // namespace

std::vector<Matrix> CpuBackend::attention_rows(const LayerTensors& layer, const AttentionRows& what) {
  // At cache positions every key moves with each eviction.
  if (what.positions == Positions::cache) return Backend::attention_rows(layer, what);
  std::vector<Matrix> all;
  if (what.queries.empty()) return all;
  std::vector<TokenRow> rows;
  for (int row = 0; row < what.rows; ++row) rows.emplace_back(what, row);
  std::vector<int> stored;
  for (const std::int32_t query : what.queries) {
    stored.push_back(stored_query(layer, query));
    all.emplace_back(layer.q.heads, rows.front().resident(query));
  }

  const int group = layer.group();
  const int query_count = static_cast<int>(what.queries.size());
  const int queries_at_once = std::max(1, block_rows / group);
  const int blocks = (query_count + queries_at_once - 1) / queries_at_once;
  const int tiles = (what.columns() + kernels_.keys - 1) / kernels_.keys;
  const std::size_t stride = product(tiles, kernels_.keys);
  std::atomic<bool> finite{true};

  // One query of a KV head, whose logits over all tokens are those of `group` rows.
  const auto attend = [&](ThreadScratch& mine, const TokenRow& row, int kv_head, int number, const float* logits) {
    const std::int32_t query = what.queries[static_cast<std::size_t>(number)];
    Matrix& out = all[static_cast<std::size_t>(number)];
    const int first = row.resident_before(query, layer.first_visible(query));
    float* resident = mine.resident_logits.at_least(stride * static_cast<std::size_t>(group));
    float* exponentials = mine.exponentials.at_least(stride * static_cast<std::size_t>(group));
    std::vector<LogitRow> heads;
    for (int head = 0; head < group; ++head) {
      const std::size_t offset = static_cast<std::size_t>(head) * stride;
      float* next = resident + offset;
      row.for_resident_runs(
          query, [&](int begin, int end) { next = std::copy(logits + offset + begin, logits + offset + end, next); });
      heads.push_back({resident + offset, exponentials + offset, first, out.columns()});
    }
    const auto all_finite = [&] {
      return std::ranges::all_of(
          heads, [&](LogitRow& head) { return kernels_.row_exponentials(head) && std::isfinite(head.sum); });
    };
    if (!all_finite()) {
      for (LogitRow& head : heads) kernels_.raise_row_reference(head);
      if (!all_finite()) {
        finite = false;
        return;
      }
    }
    for (int head = 0; head < group; ++head) {
      const LogitRow& of_head = heads[static_cast<std::size_t>(head)];
      const double sink = layer.sinks.empty() ? 0.0
                                              : sink_weight(layer.sink(kv_head * group + head) * std::numbers::log2e,
                                                            static_cast<double>(of_head.reference));
      const double sum = of_head.sum + sink;
      const float factor = sum > 0.0 ? static_cast<float>(1.0 / sum) : 0.0F;
      kernels_.row_shares(of_head, factor, out.row(kv_head * group + head).data());
    }
  };

#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads_)
  for (int kv_head = 0; kv_head < layer.k.heads; ++kv_head) {
    for (int block = 0; block < blocks; ++block) {
      if (interruption().ended()) continue;
      ThreadScratch& mine = scratch();
      const TokenRow& row = rows[static_cast<std::size_t>(what.rows == 1 ? 0 : kv_head)];
      const int begin = block * queries_at_once, end = std::min(begin + queries_at_once, query_count);
      mine.rows.clear();
      for (int number = begin; number < end; ++number)
        for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
          mine.rows.push_back({head, {.stored = stored[static_cast<std::size_t>(number)], .end = what.columns()}});
      const SoftmaxKeys keys{.count = what.columns(), .resident = row.tokens};
      const TileForm& form = form_of(kernels_, layer, keys);
      mine.block.prepare(layer, form, mine.rows, false);
      float* logits = mine.logits.at_least(stride * mine.rows.size());
      mine.block.write_logits(
          [&](int tile) -> const float* {
            float* keys_of_tile = mine.keys.at_least(product(form.cells(layer.k.dim), kernels_.keys));
            pack_keys(kernels_, form, layer, kv_head, keys, tile, mine.staging, keys_of_tile);
            return keys_of_tile;
          },
          stride, logits);
      for (int number = begin; number < end; ++number)
        attend(mine, row, kv_head, number, logits + stride * product(number - begin, group));
    }
  }
  interruption().require_all_done();
  if (!finite) throw Error{Refusal::input, "attention", "logits", "finite numbers", "NaN or Inf"};
  return all;
}

}  // namespace kvreplay
