#include "replay/estimate.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "positions.h"
#include "random.h"

namespace kvreplay {
namespace {

constexpr int sample_tokens = 2048;
constexpr int sample_queries = 64;
constexpr int sample_sets = 4;

// What a run costs whatever its size: opening, checking, writing and syncing files.
constexpr double seconds_a_trace = 0.1, seconds_a_cell = 0.01;
// Ranking one token of one row.
constexpr double seconds_a_candidate = 1.5e-8;
// One line of results.csv, and about how many a cell has for each layer and for each head of it.
constexpr std::size_t line_bytes = 250, lines_a_layer = 20;

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

/// The shortest of some calls, after one that warms up caches, threads and buffers.
template <class Call>
double seconds_of(Call call) {
  double shortest = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 4; ++i) {
    const auto start = std::chrono::steady_clock::now();
    call();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (i > 0) shortest = std::min(shortest, seconds);
  }
  return shortest;
}

/// Rows of a cell's selection, and whether it must see all layers' scores first.
struct Shape {
  std::size_t rows = 0;
  bool across_layers = false;
};

Shape shape_of(const Plan& plan, const TraceHeader& header) {
  return {static_cast<std::size_t>(rows_of(plan.heads, header.query_heads, header.kv_heads)),
          std::holds_alternative<AcrossLayers>(plan.allocate)};
}

}  // namespace

const Estimator::Rates& Estimator::rates_of(const TraceHeader& header) {
  const auto [place, is_new] = rates_.try_emplace({header.query_heads, header.kv_heads, header.head_dim});
  Rates& rates = place->second;
  if (!is_new) return rates;
  const SampleLayer layer(header);
  const LayerTensors& sample = layer.tensors;
  const std::vector<std::int32_t> all = position_range(0, sample_tokens);
  const std::span<const std::int32_t> last = std::span(all).last(sample_queries);
  rates.cumulative = seconds_of([&] { backend_.attention_sums(sample, {.queries = all, .columns = sample_tokens}); });
  rates.rows = seconds_of([&] { backend_.attention_sums(sample, {.queries = last, .columns = sample_tokens}); });
  rates.similarity = seconds_of([&] { backend_.similarity_row_maxima(sample.k, sample_tokens); });
  // Sets that differ, since equal ones are computed once: set i keeps every second token of its own.
  const auto moments_of = [&](bool half) {
    std::vector<KeptSet> sets(sample_sets, KeptSet(Heads::kv, sample.k.heads, sample_tokens));
    std::vector<const KeptSet*> pointers;
    for (int i = 0; i < sample_sets; ++i) {
      KeptSet& set = sets[static_cast<std::size_t>(i)];
      for (int row = 0; row < set.rows(); ++row) {
        set.keep(row, i);
        for (int j = i % 2; half && j < sample_tokens - sample_sets; j += 2) set.keep(row, j);
      }
      pointers.push_back(&set);
    }
    return seconds_of([&] { backend_.kept_moments(sample, last, sample_tokens, pointers); });
  };
  rates.moments = moments_of(false);
  rates.kept = std::max(0.0, moments_of(true) - rates.moments) / (0.5 * sample_sets);
  return rates;
}

Estimate Estimator::operator()(const Trace& trace, const Conditions& conditions, std::span<const Cell> cells,
                               const Demand& demand) {
  const TraceHeader& header = trace.header();
  const Rates& rates = rates_of(header);
  const double prompt = conditions.boundary, tokens = header.tokens();
  const auto positions = static_cast<std::size_t>(conditions.boundary);
  const std::size_t layers = conditions.layers.size();
  const auto query_heads = static_cast<std::size_t>(header.query_heads);

  int window = 0;
  bool cumulative = false, second_walk = false;
  int measured_cells = 0;
  double kept_share = 0, candidates = 0;  // of one layer, all cells
  std::size_t set_bits = 0, position_bytes = 0, score_bytes = 0, ranking_bytes = 0;
  for (const Cell& cell : cells) {
    const Plan plan = cell.policy.plan();
    const Shape shape = shape_of(plan, header);
    const bool whole = std::holds_alternative<Everything>(plan.allocate) || cell.budget >= conditions.boundary;
    const double share = whole ? 1.0 : cell.budget / prompt;
    if (cell.known.empty()) {
      window = std::max(window, std::min(plan.needs.last_queries, conditions.boundary));
      cumulative |= plan.needs.all_queries;
      second_walk |= shape.across_layers;
      candidates += whole ? 0.0 : static_cast<double>(shape.rows) * prompt;
      if (demand.save_scores) score_bytes += shape.rows * positions * layers * sizeof(float);
      // Scores of all layers, and for the ranking a copy of them and its order.
      if (shape.across_layers)
        ranking_bytes += shape.rows * positions * layers * (2 * sizeof(double) + sizeof(std::int32_t));
    }
    if (cell.measure) {
      ++measured_cells;
      kept_share += share;
    }
    set_bits += shape.rows * positions / 8 * layers;
    position_bytes += static_cast<std::size_t>(share * prompt) * shape.rows * layers * sizeof(std::int32_t);
  }

  const double square = prompt / sample_tokens * (prompt / sample_tokens);
  const auto at_queries = [&](double queries, double visible) {
    return queries / sample_queries * visible / sample_tokens;
  };
  const auto moments_at = [&](double blocks) { return blocks * (rates.moments + rates.kept * kept_share); };
  const double queries = static_cast<double>(conditions.eval_queries.size());
  double layer_seconds = demand.similarity_passes * rates.similarity * square + candidates * seconds_a_candidate;
  if (cumulative) layer_seconds += rates.cumulative * square;
  if (!cells.empty()) layer_seconds += rates.rows * at_queries(window + queries, tokens);
  if (measured_cells > 0) layer_seconds += moments_at(at_queries(queries, tokens));
  if (demand.every_query) layer_seconds += moments_at(at_queries(tokens, tokens / 2.0));
  // Reading from disk at 1 GB/s, slow enough for a cold cache on common drives.
  const double reading = static_cast<double>(trace.tensor_bytes()) * 1e-9 * (second_walk ? 2.0 : 1.0);
  const bool anything = !cells.empty() || demand.similarity_passes > 0;

  Estimate total;
  total.seconds = anything ? std::max(layer_seconds * static_cast<double>(layers), reading) + seconds_a_trace +
                                 seconds_a_cell * static_cast<double>(cells.size())
                           : 0.0;

  const std::size_t values = cells.size() * (layers + 1) * (query_heads + 1) * lines_a_layer * sizeof(double);
  const std::size_t attention = demand.save_attention ? query_heads * positions * layers * sizeof(float) : 0;
  const std::size_t maps = 3 * positions * layers * sizeof(float);
  const std::size_t part = position_bytes + score_bytes + attention + maps + values;
  const std::size_t observables = 3 * query_heads * positions * sizeof(double);
  const std::size_t moments =
      static_cast<std::size_t>(measured_cells + 1) * query_heads * sample_queries * sizeof(Moments);
  // A part is made in memory and written at once, and so is the file of all selections.
  const std::size_t program = std::size_t{32} << 20;
  total.memory_bytes = backend_.working_set(trace.layer(conditions.layers.front()), static_cast<int>(cells.size())) +
                       observables + moments + ranking_bytes + 2 * set_bits + 2 * part + program;
  total.disk_bytes = 2 * part + cells.size() * (layers + 1) * lines_a_layer * line_bytes;
  return total;
}

}  // namespace kvreplay
