// H2O's greedy algorithm (Zhang et al. 2023, arXiv:2306.14048, algorithm 1). What is held stays on the device from
// step to step.
#include "cuda/online_eviction.h"

#include <algorithm>
#include <cassert>
#include <span>
#include <vector>

#include "cuda/attention_operands.h"
#include "cuda/device_call.h"
#include "error.h"
#include "positions.h"

namespace kvreplay {
namespace {

// Logits that are written out at once, where there are many heads or tokens.
constexpr std::size_t most_logits = std::size_t{1} << 26;

}  // namespace

std::vector<std::int32_t> CudaBackend::online_eviction(const LayerTensors& layer, const OnlineEviction& what) {
  assert(what.recent >= 0 && what.recent <= what.budget);
  const int rows = rows_of(what.heads, layer.q.heads, layer.k.heads);
  const int given = static_cast<int>(what.resident.size()) / rows;
  const int heads_a_row = layer.q.heads / rows;
  std::vector<std::int32_t> evicted(static_cast<std::size_t>(rows) * static_cast<std::size_t>(what.tokens), -1);
  if (what.first >= what.tokens) return evicted;

  std::vector<std::int32_t> budgets, recents, lowest_seen;
  for (int token = 0; token < what.tokens; ++token) {
    lowest_seen.push_back(layer.first_visible(token));
    budgets.push_back(what.budget_after(token));
    recents.push_back(what.recent_after(token));
  }

  DeviceCall call(*this);
  const std::vector<std::int32_t> queries = position_range(what.first, what.tokens);
  PlacedQueries placed(call, layer, queries, {{.count = what.tokens}});
  const int most_held = std::min(std::max(given, what.budget), what.tokens);
  // What is computed at once decides in which order sums are made: it depends on the layer alone.
  const std::size_t a_step =
      static_cast<std::size_t>(layer.q.heads) * static_cast<std::size_t>(most_held + steps_at_once);
  const int at_once = static_cast<int>(std::clamp<std::size_t>(most_logits / a_step, 1, steps_at_once));
  const int capacity = most_held + at_once;

  // Rows that read several KV heads need all of them at once.
  const int kv_heads_at_once = what.heads == Heads::layer ? layer.k.heads : placed.kv_heads_at_once();
  for (int first = 0; first < layer.k.heads; first += kv_heads_at_once) {
    const PlacedQueries::Heads heads = placed.heads(first, std::min(kv_heads_at_once, layer.k.heads - first));
    DeviceCall some(*this);
    const int some_heads = heads.task().kv_heads * layer.group();
    const int first_row = first * layer.group() / heads_a_row;
    const int some_rows = some_heads / heads_a_row;
    const auto within = [&](int width) {
      return static_cast<std::size_t>(some_rows) * static_cast<std::size_t>(width);
    };
    const auto before = [&](int width) {
      return static_cast<std::size_t>(first_row) * static_cast<std::size_t>(width);
    };
    HeldRows held_rows{.rows = some_rows,
                       .heads = heads_a_row,
                       .capacity = capacity,
                       .given = given,
                       .first = what.first,
                       .tokens = what.tokens,
                       .accumulate = what.accumulate,
                       .budget = what.budget,
                       .budgets = some.copy(std::span<const std::int32_t>(budgets)),
                       .recents = some.copy(std::span<const std::int32_t>(recents)),
                       .sinks = what.sinks,
                       .lowest_seen = some.copy(std::span<const std::int32_t>(lowest_seen)),
                       .sink_logits = heads.task().sink_logits,
                       .resident = some.copy(what.resident.subspan(before(given), within(given)))};
    held_rows.positions = some.room<std::int32_t>(within(capacity));
    held_rows.scores = some.room<double>(within(capacity));
    begin_rows(held_rows, some.copy(what.scores.subspan(before(given), within(given))), some.stream());
    const std::span<std::int32_t> result = std::span(evicted).subspan(before(what.tokens), within(what.tokens));
    held_rows.evicted = some.room<std::int32_t>(result.size());
    check(cudaMemsetAsync(held_rows.evicted, 0xFF, result.size_bytes(), some.stream()), "cudaMemsetAsync");  // -1

    float* logits = some.room<float>(static_cast<std::size_t>(some_heads) * static_cast<std::size_t>(at_once) *
                                     static_cast<std::size_t>(capacity));
    int held = given;
    for (int token = what.first; token < what.tokens; token += at_once) {
      const int steps = std::min(at_once, what.tokens - token);
      write_held_logits(placed.form(), heads.task(), held_rows, held, token, steps, logits, some.stream());
      take_steps(held_rows, held, token, steps, logits, call.bad(), some.stream());
      held = std::min(held + steps, what.budget_after(token + steps - 1));
    }
    some.fetch(static_cast<const std::int32_t*>(held_rows.evicted), result);
  }
  if (call.found_bad()) throw Error{Refusal::input, "attention", "logits", "finite numbers", "NaN or Inf"};
  return evicted;
}

}  // namespace kvreplay
