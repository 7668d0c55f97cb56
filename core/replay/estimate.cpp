#include "replay/estimate.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "random.h"

namespace kvreplay {
namespace {

constexpr int sample_tokens = 1024;
constexpr int sample_queries = 64;

/// A random float32 layer of the trace's head shape.
struct SampleLayer {
  explicit SampleLayer(const TraceHeader& header) {
    const auto fill = [&](std::vector<float>& values, int heads, std::uint64_t tag) {
      values.resize(static_cast<std::size_t>(heads) * sample_tokens * static_cast<std::size_t>(header.head_dim));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(uniform(chain(tag, i))) - 0.5F;
      return TensorView{reinterpret_cast<const std::byte*>(values.data()), DType::float32, heads, sample_tokens,
                        header.head_dim};
    };
    tensors.q = fill(q, header.query_heads, 1);
    tensors.k = fill(k, header.kv_heads, 2);
    tensors.v = fill(v, header.kv_heads, 3);
    tensors.softmax_scale = static_cast<float>(header.softmax_scale);
  }

  std::vector<float> q, k, v;
  LayerTensors tensors;
};

/// Seconds of the second of two calls: the first one warms up caches, threads and buffers.
template <class Call>
double seconds_of(Call call) {
  double seconds = 0;
  for (int i = 0; i < 2; ++i) {
    const auto start = std::chrono::steady_clock::now();
    call();
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  return seconds;
}

std::vector<std::int32_t> range(int begin, int end) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(end - begin));
  std::iota(all.begin(), all.end(), begin);
  return all;
}

}  // namespace

Estimate estimate(Backend& backend, const Trace& trace, const Conditions& conditions, std::span<const Cell> cells) {
  const TraceHeader& header = trace.header();
  const SampleLayer sample(header);
  const double n = sample_tokens, prompt = conditions.boundary, tokens = header.tokens();
  const double queries = static_cast<double>(conditions.eval_queries.size());
  const double layers = static_cast<double>(conditions.layers.size());

  int window = 0;
  bool cumulative = false;
  double kept_share = 0;
  for (const Cell& cell : cells) {
    const Plan plan = cell.policy.plan();
    if (cell.known.empty()) {
      window = std::max(window, std::min(plan.needs.last_queries, conditions.boundary));
      cumulative |= plan.needs.all_queries;
    }
    const bool whole = std::holds_alternative<Everything>(plan.allocate);
    if (cell.measure) kept_share += whole ? 1.0 : std::min(1.0, cell.budget / prompt);
  }

  Estimate total;
  double layer_seconds = 0;
  if (cumulative) {
    const std::vector<std::int32_t> all = range(0, sample_tokens);
    const double s =
        seconds_of([&] { backend.attention_sums(sample.tensors, {.queries = all, .columns = sample_tokens}); });
    layer_seconds += s * (prompt / n) * (prompt / n);
  }
  // Window attention, and eval attention, which the bound of the self-check always needs.
  const std::vector<std::int32_t> last = range(sample_tokens - sample_queries, sample_tokens);
  const double row_block =
      seconds_of([&] { backend.attention_sums(sample.tensors, {.queries = last, .columns = sample_tokens}); });
  layer_seconds += row_block * (window + queries) / sample_queries * tokens / n;
  // Moments: a part for the attention itself, a part that grows with what is kept.
  const KeptSet none(Heads::kv, header.kv_heads, sample_tokens);
  KeptSet half(Heads::kv, header.kv_heads, sample_tokens);
  for (int row = 0; row < half.rows(); ++row)
    for (int j = 0; j < sample_tokens; j += 2) half.keep(row, j);
  const auto moments_of = [&](const KeptSet& set) {
    const std::vector<const KeptSet*> sets(4, &set);
    return seconds_of([&] { backend.kept_moments(sample.tensors, last, sample_tokens, sets); });
  };
  const double base = moments_of(none), with_half = std::max(moments_of(half), base);
  const double blocks = queries / sample_queries * tokens / n;
  layer_seconds += blocks * (base + (with_half - base) / 2.0 * kept_share);
  const double similarity = seconds_of([&] { backend.similarity_row_maxima(sample.tensors.k, sample_tokens); });
  layer_seconds += 2.0 * similarity * (prompt / n) * (prompt / n);

  const bool second_walk = std::ranges::any_of(
      cells, [](const Cell& cell) { return std::holds_alternative<AcrossLayers>(cell.policy.plan().allocate); });
  // Reading from disk at 1 GB/s, slow enough for a cold cache on common drives.
  const double reading = static_cast<double>(trace.tensor_bytes()) * 1e-9 * (second_walk ? 2.0 : 1.0);
  total.seconds = std::max(layer_seconds * layers, reading);

  const std::size_t heads = static_cast<std::size_t>(header.query_heads);
  const std::size_t cell_bits = static_cast<std::size_t>(header.kv_heads) * static_cast<std::size_t>(prompt) / 8;
  const std::size_t observables = 3 * heads * static_cast<std::size_t>(prompt) * sizeof(double);
  const std::size_t moments = cells.size() * heads * sample_queries * sizeof(Moments);
  LayerTensors layer = trace.layer(conditions.layers.front());
  total.memory_bytes = backend.working_set(layer, static_cast<int>(cells.size())) + observables + moments +
                       cells.size() * cell_bits * conditions.layers.size() * 2 +
                       static_cast<std::size_t>(prompt * layers) * 3 * sizeof(double) + (std::size_t{32} << 20);
  const double positions = kept_share * prompt * layers * header.kv_heads * sizeof(std::int32_t);
  const double metrics = static_cast<double>(cells.size()) * (layers + 1) * (header.query_heads + 1) * 8 * 20;
  total.disk_bytes = static_cast<std::size_t>(2 * positions + metrics + prompt * layers * 3 * sizeof(float));
  return total;
}

}  // namespace kvreplay
