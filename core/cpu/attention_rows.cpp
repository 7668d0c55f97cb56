// Attention of single queries over what is resident to each. Little changes from one query to the next, so the logits
// of several are computed at once over all that any of them sees; then each row brings its own side by side.
#include <algorithm>
#include <atomic>
#include <cstddef>

#include "cpu/cpu_backend.h"
#include "error.h"

namespace kvreplay {
namespace {

// Rows that read a packed tile of keys while it lies in a cache.
constexpr int block_rows = 48;
// Packed keys of as many KV heads as fit, so that there are blocks for more threads.
constexpr std::size_t packed_bytes = std::size_t{64} << 20;

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
  const auto row_of = [&](int kv_head) -> const TokenRow& {
    return rows[static_cast<std::size_t>(what.rows == 1 ? 0 : kv_head)];
  };
  std::vector<int> stored, resident_to;
  for (std::size_t number = 0; number < what.queries.size(); ++number) {
    stored.push_back(stored_query(layer, what.queries[number]));
    resident_to.push_back(rows.front().resident(what.queries[number]));
    const auto [first, end] = what.wanted_of(number, resident_to.back());
    all.emplace_back(layer.q.heads, end - first);
  }

  const int group = layer.group();
  const int query_count = static_cast<int>(what.queries.size());
  const int queries_at_once = std::max(1, block_rows / group);
  const int blocks = (query_count + queries_at_once - 1) / queries_at_once;
  const int tiles = (what.columns() + kernels_.keys - 1) / kernels_.keys;
  const std::size_t stride = product(tiles, kernels_.keys);
  const TileForm& form = form_of(kernels_, layer, {.count = what.columns(), .resident = rows.front().tokens});
  const std::size_t tile_cells = product(form.cells(layer.k.dim), kernels_.keys);
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
      heads.push_back({resident + offset, exponentials + offset, first, resident_to[static_cast<std::size_t>(number)]});
    }
    if (!compute_rows(kernels_, heads)) {
      finite = false;
      return;
    }
    const NumberRange wanted =
        what.wanted_of(static_cast<std::size_t>(number), resident_to[static_cast<std::size_t>(number)]);
    int head = kv_head * group;
    for (LogitRow& of_head : heads) {
      of_head.first = std::max(of_head.first, wanted.first);
      of_head.end = std::min(of_head.end, wanted.end);
      double* const columns = out.row(head).data();
      if (of_head.first < of_head.end)
        add_softmax(kernels_, of_head, 1.0, layer.sink(head), columns + (of_head.first - wanted.first));
      ++head;
    }
  };

  const std::size_t head_cells = static_cast<std::size_t>(tiles) * tile_cells;
  const auto heads_at_once = static_cast<int>(
      std::clamp(packed_bytes / (head_cells * sizeof(float)), std::size_t{1}, static_cast<std::size_t>(layer.k.heads)));
  float* packed = packed_keys_.at_least(head_cells * static_cast<std::size_t>(heads_at_once));
  const auto packed_tile = [&](int kv_head, int tile) {
    return packed + static_cast<std::size_t>(kv_head % heads_at_once) * head_cells +
           static_cast<std::size_t>(tile) * tile_cells;
  };
#pragma omp parallel num_threads(threads_)
  for (int first_head = 0; first_head < layer.k.heads; first_head += heads_at_once) {
    const int end_head = std::min(first_head + heads_at_once, layer.k.heads);
#pragma omp for collapse(2) schedule(static)
    for (int kv_head = first_head; kv_head < end_head; ++kv_head)
      for (int tile = 0; tile < tiles; ++tile)
        pack_keys(kernels_, form, layer, kv_head, {.count = what.columns(), .resident = row_of(kv_head).tokens}, tile,
                  scratch().staging, packed_tile(kv_head, tile));
#pragma omp for collapse(2) schedule(dynamic)
    for (int kv_head = first_head; kv_head < end_head; ++kv_head) {
      for (int block = 0; block < blocks; ++block) {
        if (interruption().ended()) continue;
        ThreadScratch& mine = scratch();
        const int begin = block * queries_at_once, end = std::min(begin + queries_at_once, query_count);
        mine.rows.clear();
        for (int number = begin; number < end; ++number)
          for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
            mine.rows.push_back({head, {.stored = stored[static_cast<std::size_t>(number)], .end = what.columns()}});
        mine.block.prepare(layer, form, mine.rows, false);
        float* logits = mine.logits.at_least(stride * mine.rows.size());
        mine.block.write_logits([&](int tile) { return packed_tile(kv_head, tile); }, stride, logits);
        for (int number = begin; number < end; ++number)
          attend(mine, row_of(kv_head), kv_head, number, logits + stride * product(number - begin, group));
      }
    }
  }
  interruption().require_all_done();
  if (!finite) throw Error{Refusal::input, "attention", "logits", "finite numbers", "NaN or Inf"};
  return all;
}

}  // namespace kvreplay
