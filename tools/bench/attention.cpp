// How fast the backend is on random layers. Every benchmark checks its answer before it is timed. Rates are in useful
// operations, a multiplication and an addition being two: causal attention counts the visible half.
//   kvreplay_bench --benchmark_filter=cumulative
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <numeric>
#include <vector>

#include "attention/backend.h"
#include "random.h"

namespace kvreplay {
namespace {

/// A layer of random float32 tensors: 8 query heads on 2 KV heads.
struct RandomLayer {
  static constexpr int query_heads = 8;
  static constexpr int kv_heads = 2;

  RandomLayer(int tokens, int dim) {
    q = fill(query_heads, tokens, dim, 1);
    k = fill(kv_heads, tokens, dim, 2);
    v = fill(kv_heads, tokens, dim, 3);
    tensors.q = view(q, query_heads, tokens, dim);
    tensors.k = view(k, kv_heads, tokens, dim);
    tensors.v = view(v, kv_heads, tokens, dim);
    tensors.softmax_scale = 1.0F / std::sqrt(static_cast<float>(dim));
  }

  static std::vector<float> fill(int heads, int tokens, int dim, std::uint64_t tag) {
    std::vector<float> values(static_cast<std::size_t>(heads) * static_cast<std::size_t>(tokens) *
                              static_cast<std::size_t>(dim));
    std::uint64_t state = tag;
    for (float& value : values) value = static_cast<float>(3.0 * uniform(state = mix(state)) - 1.5);
    return values;
  }
  static TensorView view(const std::vector<float>& values, int heads, int tokens, int dim) {
    return {reinterpret_cast<const std::byte*>(values.data()), DType::float32, heads, tokens, dim};
  }

  std::vector<float> q, k, v;
  LayerTensors tensors;
};

std::vector<std::int32_t> last_queries(int tokens, int count) {
  std::vector<std::int32_t> positions(static_cast<std::size_t>(count));
  std::iota(positions.begin(), positions.end(), tokens - count);
  return positions;
}

void report(benchmark::State& state, double operations) {
  state.counters["GF/s"] = benchmark::Counter(operations * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

void sums_of_last_queries(benchmark::State& state, int tokens, int dim, int threads, int count) {
  const RandomLayer layer(tokens, dim);
  const auto backend = make_backend("cpu", threads);
  const std::vector<std::int32_t> queries = last_queries(tokens, count);
  const AttentionSums what{.queries = queries, .columns = tokens};
  const Matrix sums = backend->attention_sums(layer.tensors, what);
  for (int head = 0; head < sums.rows(); ++head) {
    const double total = std::accumulate(sums.row(head).begin(), sums.row(head).end(), 0.0);
    if (std::abs(total / count - 1.0) > 1e-6) return state.SkipWithError("rows of attention do not sum to 1");
  }
  for (auto _ : state) benchmark::DoNotOptimize(backend->attention_sums(layer.tensors, what));
  const double visible = static_cast<double>(count) * (static_cast<double>(tokens) - 0.5 * (count - 1));
  report(state, 2.0 * visible * dim * RandomLayer::query_heads);
}

void cumulative_attention(benchmark::State& state) {
  const int tokens = static_cast<int>(state.range(0));
  sums_of_last_queries(state, tokens, static_cast<int>(state.range(1)), static_cast<int>(state.range(2)), tokens);
}

void window_attention(benchmark::State& state) {
  sums_of_last_queries(state, static_cast<int>(state.range(0)), static_cast<int>(state.range(1)),
                       static_cast<int>(state.range(2)), 32);
}

void kept_moments(benchmark::State& state) {
  const int tokens = static_cast<int>(state.range(0));
  const int dim = static_cast<int>(state.range(1));
  constexpr int eval = 64;
  constexpr int set_count = 12;
  const RandomLayer layer(tokens, dim);
  const auto backend = make_backend("cpu", static_cast<int>(state.range(2)));
  const std::vector<std::int32_t> queries = last_queries(tokens, eval);
  const int boundary = tokens - eval;
  std::vector<KeptSet> sets;
  for (int number = 0; number < set_count; ++number) {
    KeptSet set(Heads::kv, RandomLayer::kv_heads, boundary);
    for (int head = 0; head < RandomLayer::kv_heads; ++head)
      for (int position = 0; position < boundary; ++position)
        if (number == 0 || chain(static_cast<std::uint64_t>(number), head, position) % 10 == 0)
          set.keep(head, position);
    sets.push_back(set);
  }
  std::vector<KeptSets> kept;
  for (const KeptSet& set : sets) kept.push_back({&set, 1});
  const KeptMoments moments = backend->kept_moments(layer.tensors, queries, boundary, kept);
  for (std::size_t cell = 0; cell < moments.full.size(); ++cell) {
    if (moments.kept[cell].mass != 1.0 || moments.kept[cell].error_square != 0.0) {
      return state.SkipWithError("keeping everything is not exact");
    }
  }
  for (auto _ : state) benchmark::DoNotOptimize(backend->kept_moments(layer.tensors, queries, boundary, kept));
  // Products with all keys, weighted values of everything once, and of a tenth eleven times.
  report(state, 2.0 * eval * tokens * dim * RandomLayer::query_heads * (1.0 + 1.0 + 0.1 * (set_count - 1)));
}

void redundancy(benchmark::State& state) {
  const int tokens = static_cast<int>(state.range(0));
  const int dim = static_cast<int>(state.range(1));
  const RandomLayer layer(tokens, dim);
  const auto backend = make_backend("cpu", static_cast<int>(state.range(2)));
  std::vector<float> twice = layer.k;
  std::copy_n(twice.begin(), dim, twice.begin() + dim);
  std::copy_n(twice.begin() + tokens * dim, dim, twice.begin() + (tokens + 1) * dim);
  const TensorView view = RandomLayer::view(twice, RandomLayer::kv_heads, tokens, dim);
  const std::vector<double> maxima = backend->similarity_row_maxima(view, tokens);
  if (std::abs(maxima[0] - 1.0) > 1e-6 || maxima[0] != maxima[1]) {
    return state.SkipWithError("equal tokens do not have cosine 1");
  }
  for (auto _ : state) benchmark::DoNotOptimize(backend->similarity_row_maxima(view, tokens));
  report(state, static_cast<double>(tokens) * tokens * dim * RandomLayer::kv_heads);
}

const std::vector<std::vector<std::int64_t>> shapes{{4096, 16384}, {64, 128}, {1, 2}};

BENCHMARK(cumulative_attention)->ArgNames({"n", "d", "threads"})->ArgsProduct(shapes)->UseRealTime();
BENCHMARK(window_attention)->ArgNames({"n", "d", "threads"})->ArgsProduct(shapes)->UseRealTime();
BENCHMARK(kept_moments)->ArgNames({"n", "d", "threads"})->ArgsProduct(shapes)->UseRealTime();
BENCHMARK(redundancy)->ArgNames({"n", "d", "threads"})->ArgsProduct(shapes)->UseRealTime();

}  // namespace
}  // namespace kvreplay

BENCHMARK_MAIN();
