#include "replay/estimate.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <set>
#include <utility>

#include "observables/projected_outputs.h"
#include "positions.h"
#include "random.h"
#include "replay/trace_inputs.h"

namespace kvreplay {
namespace {

constexpr int sample_tokens = 2048;
constexpr int sample_queries = 64;
constexpr int sample_sets = 4;
// Of the calls that are slow for their size: queries of a general comparison, tokens of a greedy algorithm.
constexpr int sample_few_queries = 8;
constexpr int sample_steps = 256;

// What a run costs whatever its size: opening, checking, writing and syncing files.
constexpr double seconds_a_trace = 0.1, seconds_a_cell = 0.01;
// Ranking one token of one row.
constexpr double seconds_a_candidate = 1.5e-8;
// One line of results.csv, and about how many a cell has for each layer and for each head of it.
constexpr std::size_t line_bytes = 250, lines_a_layer = 20;

}  // namespace

struct Estimator::Sample {
  explicit Sample(const TraceHeader& header) {
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
  std::map<Call, double> seconds;
};

Estimator::Estimator(Backend& backend) : backend_(backend) {}
Estimator::~Estimator() = default;

namespace {

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

/// Rows of a cell's selection, the finest of its layers, and what it needs.
struct Shape {
  std::size_t rows = 0;
  bool across_layers = false;
  bool whole = true;
  bool own_memory = false;  // counts of any size
  bool general = false;     // measured by the general comparison
  bool online = false;
  bool in_time = false;       // sets change with time
  bool reads = false;         // each query reads a set of its own
  bool pairs = false;         // layers are stored two by two
  int similarity_layers = 0;  // that choose by similarity
  int last_queries = 0;
  bool all_queries = false;
  bool unrotates = false;
  bool repeats = false;  // keys and values are copied for each query head
};

Shape shape_of(const Cell& cell, const TraceHeader& header, const Conditions& conditions, MarkedQuestion question) {
  Shape shape;
  for (const auto& [first, count, plan] : cell.policy.plans(static_cast<int>(conditions.layers.size()))) {
    shape.rows = std::max(shape.rows,
                          static_cast<std::size_t>(rows_of(plan.grouping.heads, header.query_heads, header.kv_heads)));
    shape.across_layers |= plan.allocate->from() == CountsFrom::all_layers;
    shape.whole &= keeps_everything(plan, cell.budget, conditions.boundary);
    shape.own_memory |= plan.own_memory;
    shape.general |= plan.store->moves_tokens() || plan.store->changes_tokens();
    shape.reads |= plan.schedule->decided() == Decision::never;
    shape.in_time |= plan.schedule->decided() == Decision::during_prefill;
    shape.pairs |= plan.store->pairs_layers();
    shape.online |= plan.schedule->is_online();
    if (plan.select.one_set)
      for (int l = 0; l < count; ++l) shape.similarity_layers += plan.share.is_source(l, count) ? 1 : 0;
    const Needs needs = needs_of(plan);
    const int asked = needs.question ? plan.schedule->spared(conditions.boundary, question) : 0;
    shape.last_queries = std::max({shape.last_queries, needs.last_queries, asked});
    // What un-rotates queries reads each of them for itself, not against all keys.
    shape.all_queries |= needs.all_queries && !needs.rope && !shape.online;
    shape.unrotates |= needs.rope;
    shape.repeats |= plan.schedule->repeats(plan.grouping.heads);
  }
  return shape;
}

}  // namespace

double Estimator::seconds(Call call, const TraceHeader& header) {
  std::unique_ptr<Sample>& of_shape = samples_[{header.query_heads, header.kv_heads, header.head_dim}];
  if (!of_shape) of_shape = std::make_unique<Sample>(header);
  if (const auto known = of_shape->seconds.find(call); known != of_shape->seconds.end()) return known->second;
  const LayerTensors& sample = of_shape->tensors;
  const std::vector<std::int32_t> all = position_range(0, sample_tokens);
  const std::span<const std::int32_t> last = std::span(all).last(sample_queries);
  // Sets that differ, since equal ones are computed once: set i keeps every second token, and token i at the end.
  const auto moments_of = [&](int count, MomentParts parts) {
    std::vector<KeptSet> sets(static_cast<std::size_t>(count), KeptSet(Heads::kv, sample.k.heads, sample_tokens));
    std::vector<KeptSets> kept;
    for (int i = 0; i < count; ++i) {
      KeptSet& set = sets[static_cast<std::size_t>(i)];
      for (int row = 0; row < set.rows(); ++row) {
        for (int j = 0; j < sample_tokens - sample_sets; j += 2) set.keep(row, j);
        set.keep(row, sample_tokens - 1 - i);
      }
      kept.emplace_back(&set, 1);
    }
    return seconds_of([&] { backend_.kept_moments(sample, last, sample_tokens, kept, parts); });
  };
  // What is beyond the sums of attention, of each set and of everything, which is always among them.
  const auto parts_of = [&](MomentParts parts, double shares) {
    return std::max(0.0, moments_of(sample_sets, parts) - moments_of(sample_sets, {})) / (1.0 + shares * sample_sets);
  };
  const auto measure = [&]() -> double {
    switch (call) {
      case Call::cumulative:
        return seconds_of([&] { backend_.attention_sums(sample, {.queries = all, .columns = sample_tokens}); });
      case Call::rows:
        return seconds_of([&] { backend_.attention_sums(sample, {.queries = last, .columns = sample_tokens}); });
      case Call::moments:
        return moments_of(0, {});
      case Call::sets:
        return std::max(0.0, moments_of(sample_sets, {}) - seconds(Call::moments, header)) / sample_sets;
      case Call::outputs:
        return parts_of({.outputs = true}, 0.5);
      case Call::others:
        return parts_of({.logits = true, .unaligned = true}, 1.0);
      case Call::projection: {
        const std::vector<float> outputs(sample.q.bytes() / sizeof(float) / sample_tokens * sample_queries, 1.0F);
        const TensorView projection{sample.q.data, sample.q.dtype, 1, sample_tokens, sample.q.heads * sample.q.dim};
        return seconds_of(
            [&] { projected_squares(projection, outputs, sample.q.heads, sample_queries, backend_.threads()); });
      }
      case Call::similarity:
        return seconds_of([&] { backend_.similarity_row_maxima(sample.k, sample_tokens); });
      case Call::comparison: {
        KeptSet half(Heads::layer, 1, sample_tokens);
        for (int j = 0; j < sample_tokens; j += 2) half.keep(0, j);
        return seconds_of([&] {
          backend_.compare_attention(sample, sample, Positions::cache, last.last(sample_few_queries), sample_tokens,
                                     KeptSets(&half, 1));
        });
      }
      case Call::online:
        return seconds_of(
            [&] { backend_.online_eviction(sample, {.tokens = sample_steps, .budget = sample_steps / 2}); });
      case Call::redundancy:
        break;
    }
    const std::vector<std::int32_t> some = position_range(0, sample_steps);
    return seconds_of([&] { backend_.least_redundant(sample, {.resident = some, .keep = sample_steps / 2}); });
  };
  return of_shape->seconds[call] = measure();
}

Estimate Estimator::operator()(const Trace& trace, const Conditions& conditions, std::span<const Cell> cells,
                               const Demand& demand) {
  const TraceHeader& header = trace.header();
  const double prompt = conditions.boundary, tokens = header.tokens();
  const auto positions = static_cast<std::size_t>(conditions.boundary);
  const std::size_t layers = conditions.layers.size();
  const MarkedQuestion question = marked_question(trace, conditions.boundary);
  const auto query_heads = static_cast<std::size_t>(header.query_heads);

  int window = 0;
  bool cumulative = false, second_walk = false;
  int measured_cells = 0;
  double comparisons = 0, online = 0, redundancy = 0;  // of one layer, in units of the sample's calls
  std::size_t stored_bytes = 0, read_bytes = 0, angle_bytes = 0, repeated_bytes = 0;
  bool pairs = false;
  Workload work{.sets = static_cast<int>(cells.size())};
  double kept_share = 0, candidates = 0;  // of one layer, all cells
  std::size_t set_bits = 0, position_bytes = 0, score_bytes = 0, ranking_bytes = 0, largest_copy = 0, copies = 0;
  std::set<std::pair<ScoreKey, int>> held_scores;  // of layers
  for (const Cell& cell : cells) {
    const Shape shape = shape_of(cell, header, conditions, question);
    const bool whole = shape.whole;
    const double share = whole || shape.own_memory ? 1.0 : cell.budget / prompt;
    if (cell.known.empty()) {
      window = std::max(window, std::min(shape.last_queries, conditions.boundary));
      cumulative |= shape.all_queries;
      // Sines and cosines of all positions.
      if (shape.unrotates)
        angle_bytes =
            static_cast<std::size_t>(tokens) * static_cast<std::size_t>(header.rope_pairs) * 2 * sizeof(double);
      if (shape.repeats && !whole)
        repeated_bytes = std::size_t{2} * query_heads * static_cast<std::size_t>(header.tokens()) *
                         static_cast<std::size_t>(header.head_dim) * sizeof(float);
      second_walk |= shape.across_layers;
      const double steps = tokens / sample_steps;
      work.online = work.online || (shape.online && !whole);
      if (shape.online && !whole) online += steps * share * prompt / (sample_steps / 2.0);
      if (shape.similarity_layers > 0 && !whole) {
        redundancy +=
            prompt / sample_steps * prompt / sample_steps * shape.similarity_layers / static_cast<double>(layers);
        work.redundancy_tokens = conditions.boundary;
      }
      candidates += whole ? 0.0 : static_cast<double>(shape.rows) * prompt;
      if (demand.save_scores) score_bytes += shape.rows * positions * layers * sizeof(float);
      // Scores of all layers, held once for all cells that share them; and a copy of them and its order, of as
      // many cells as there are threads, while their slots are divided.
      std::size_t ranked = 0;
      for (const auto& [first, count, plan] : cell.policy.plans(static_cast<int>(layers))) {
        if (plan.allocate->from() != CountsFrom::all_layers) continue;
        const std::size_t scores =
            static_cast<std::size_t>(rows_of(plan.grouping.heads, header.query_heads, header.kv_heads)) * positions;
        ranked += scores * static_cast<std::size_t>(count);
        const Protection::Clamped by_rule = kept_by_rule(plan, cell.budget, conditions.boundary, question);
        const ScoreKey key = score_key(plan, scoring_of(plan, by_rule, cell.budget, conditions.boundary, question));
        for (int l = first; l < first + count; ++l)
          if (held_scores.emplace(key, l).second || plan.score.name.empty()) ranking_bytes += scores * sizeof(double);
      }
      largest_copy = std::max(largest_copy, ranked * (sizeof(double) + sizeof(std::int32_t)));
      if (ranked > 0) ++copies;
    }
    if (cell.measure) {
      ++measured_cells;
      kept_share += share;
      work.parts.add(*cell.measure);
      if (shape.general) {
        work.comparisons = true;
        comparisons +=
            static_cast<double>(conditions.eval_queries.size()) / sample_few_queries * tokens / sample_tokens;
        // Keys and values of one layer in float32.
        stored_bytes = std::size_t{2} * static_cast<std::size_t>(header.kv_heads) *
                       static_cast<std::size_t>(header.tokens()) * static_cast<std::size_t>(header.head_dim) *
                       sizeof(float);
      }
    }
    set_bits += shape.rows * positions / 8 * layers;
    pairs |= shape.pairs;
    // Sets of a block of queries, a row each head; bounds of pages, two float64 a channel and some 16 tokens.
    if (shape.reads)
      read_bytes += query_heads * positions / 8 * sample_queries +
                    static_cast<std::size_t>(header.kv_heads) * positions * static_cast<std::size_t>(header.head_dim);
    if (shape.in_time) position_bytes += shape.rows * static_cast<std::size_t>(tokens) * layers * sizeof(std::int32_t);
    position_bytes += static_cast<std::size_t>(share * prompt) * shape.rows * layers * sizeof(std::int32_t);
  }

  const double square = prompt / sample_tokens * (prompt / sample_tokens);
  const auto at_queries = [&](double queries, double visible) {
    return queries / sample_queries * visible / sample_tokens;
  };
  const auto costs = [&](Call call, double times) { return times > 0 ? times * seconds(call, header) : 0.0; };
  const double queries = static_cast<double>(conditions.eval_queries.size());
  const auto moments_at = [&](double blocks, MomentParts parts) {
    return costs(Call::moments, blocks) + costs(Call::sets, blocks * measured_cells) +
           (parts.outputs ? costs(Call::outputs, blocks * (1 + kept_share)) : 0.0) +
           // A projection has about as many rows as columns.
           (parts.vectors ? costs(Call::projection, queries / sample_queries * (1 + measured_cells) *
                                                        header.query_heads * header.head_dim / sample_tokens)
                          : 0.0) +
           (parts.logits || parts.unaligned ? costs(Call::others, blocks * (1 + measured_cells)) : 0.0);
  };
  double layer_seconds = costs(Call::similarity, demand.similarity_passes * square) + candidates * seconds_a_candidate;
  if (cumulative) layer_seconds += costs(Call::cumulative, square * demand.cumulative_share);
  if (!cells.empty()) layer_seconds += costs(Call::rows, at_queries(window + queries, tokens));
  if (measured_cells > 0) layer_seconds += moments_at(at_queries(queries, tokens), work.parts);
  layer_seconds +=
      costs(Call::comparison, comparisons) + costs(Call::online, online) + costs(Call::redundancy, redundancy);
  if (demand.every_query) layer_seconds += moments_at(at_queries(tokens, tokens / 2.0), {});
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
      static_cast<std::size_t>(measured_cells + 1) * query_heads * sample_queries *
      (sizeof(Moments) + (work.parts.vectors ? 2 * sizeof(float) * static_cast<std::size_t>(header.head_dim) : 0));
  const std::size_t at_once = std::min(copies, static_cast<std::size_t>(backend_.threads()));
  // A part is made in memory and written at once, and so is the file of all selections.
  const std::size_t program = std::size_t{32} << 20;
  total.memory_bytes = backend_.working_set(trace.layer(conditions.layers.front()), work) + observables + moments +
                       ranking_bytes + at_once * largest_copy + stored_bytes + read_bytes + angle_bytes +
                       repeated_bytes + 2 * set_bits + 2 * part + program;
  std::size_t archived_bytes = 0;
  for (const int layer : conditions.layers) {
    archived_bytes = std::max(archived_bytes, trace.archived_bytes(layer));
    total.mapped_bytes = std::max(total.mapped_bytes, trace.mapped_bytes(layer));
  }
  // A layer, and the one that it is stored with.
  total.memory_bytes += archived_bytes * (pairs ? 2 : 1);
  total.mapped_bytes *= pairs ? 2 : 1;
  total.disk_bytes = 2 * part + cells.size() * (layers + 1) * lines_a_layer * line_bytes;
  return total;
}

}  // namespace kvreplay
