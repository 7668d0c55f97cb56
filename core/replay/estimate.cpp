#include "replay/estimate.h"

#include <algorithm>
#include <set>
#include <utility>

#include "replay/trace_inputs.h"

namespace kvreplay {
namespace {

// What a run costs whatever its size: opening, checking, writing and syncing files.
constexpr double seconds_a_trace = 0.1, seconds_a_cell = 0.01;
// Ranking one token of one row.
constexpr double seconds_a_candidate = 1.5e-8;
// One line of results.csv, and about how many a cell has for each layer and for each head of it.
constexpr std::size_t line_bytes = 250, lines_a_layer = 20;

/// Rows of a cell's selection, the finest of its layers, and what it needs.
struct Shape {
  std::size_t rows = 0;
  bool across_layers = false;
  bool whole = true;
  bool own_memory = false;  // counts of any size
  bool general = false;     // measured by the general comparison
  bool evolves = false;     // its stored values change with time
  bool weighs = false;
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

Shape shape_of(const Cell& cell, const LayerShape& largest, const Conditions& conditions, MarkedQuestion question) {
  Shape shape;
  for (const auto& [first, count, plan] : cell.policy.plans(static_cast<int>(conditions.layers.size()))) {
    shape.rows = std::max(
        shape.rows, static_cast<std::size_t>(rows_of(plan.grouping.heads, largest.query_heads, largest.kv_heads)));
    shape.across_layers |= plan.allocate->from == CountsFrom::all_layers;
    shape.whole &= keeps_everything(plan, cell.budget, conditions.boundary);
    shape.own_memory |= plan.own_memory;
    shape.general |= plan.store->moves_tokens || plan.store->changes_tokens() || plan.schedule->weighs_tokens();
    shape.evolves |= static_cast<bool>(plan.store->evolve);
    shape.reads |= plan.schedule->decided() == Decision::never;
    shape.weighs |= plan.schedule->weighs_tokens();
    shape.in_time |= plan.schedule->decided() == Decision::during_prefill;
    shape.pairs |= plan.store->pairs_layers();
    shape.online |= plan.schedule->is_online() && (plan.score || plan.store->evolve);
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

/// What the cells of a run add up to.
class CellSums {
 public:
  CellSums(const Trace& trace, const Conditions& on, bool saves_scores, std::span<const Cell> cells)
      : header(trace.header()),
        largest(header.largest_shape(on.layers)),
        conditions(on),
        question(marked_question(trace, on.boundary)),
        prompt(on.boundary),
        positions(static_cast<std::size_t>(on.boundary)),
        layers(on.layers.size()),
        save_scores(saves_scores) {
    for (const Cell& cell : cells) add(cell);
  }

  const TraceHeader& header;
  const LayerShape largest;  // of the treated layers
  const Conditions& conditions;
  const MarkedQuestion question;
  const double prompt;
  const std::size_t positions;
  const std::size_t layers;
  const bool save_scores;

  Workload work{};
  int window = 0;  // last queries that some policy reads
  bool cumulative = false, second_walk = false, pairs = false;
  int measured_cells = 0;
  double kept_share = 0, candidates = 0;               // of one layer, all cells
  double comparisons = 0, online = 0, redundancy = 0;  // of one layer, in units of the sample's calls
  std::size_t stored_bytes = 0, read_bytes = 0, angle_bytes = 0, repeated_bytes = 0;
  std::size_t set_bits = 0, position_bytes = 0, score_bytes = 0, ranking_bytes = 0;
  std::size_t largest_copy = 0, copies = 0;  // of scores, while slots are divided

 private:
  void add(const Cell& cell) {
    const Shape shape = shape_of(cell, largest, conditions, question);
    const double share = shape.whole || shape.own_memory ? 1.0 : cell.budget / prompt;
    ++work.sets;
    if (cell.known.empty()) {
      add_selection(shape, share);
      add_ranking(cell);
    }
    if (cell.measure) add_measurement(cell, shape, share);
    add_sets(shape, share);
  }

  /// A key and a value of float32 for each token of the trace and each of `heads` heads.
  std::size_t vector_bytes(int heads) const {
    return static_cast<std::size_t>(heads) * static_cast<std::size_t>(header.tokens()) *
           static_cast<std::size_t>(largest.key_dim + largest.value_dim) * sizeof(float);
  }

  void add_selection(const Shape& shape, double share) {
    window = std::max(window, std::min(shape.last_queries, conditions.boundary));
    cumulative |= shape.all_queries;
    second_walk |= shape.across_layers;
    // Sines and cosines of all positions.
    if (shape.unrotates)
      angle_bytes =
          static_cast<std::size_t>(header.tokens()) * static_cast<std::size_t>(header.rope_pairs) * 2 * sizeof(double);
    if (save_scores) score_bytes += shape.rows * positions * layers * sizeof(float);
    if (shape.whole) return;
    if (shape.repeats) repeated_bytes = 2 * vector_bytes(largest.query_heads);
    candidates += static_cast<double>(shape.rows) * prompt;
    if (shape.online) {
      work.online_heads = std::max(work.online_heads, shape.rows == 1 ? largest.kv_heads : 1);
      online += static_cast<double>(header.tokens()) / sample_steps * share * prompt / (sample_steps / 2.0);
    }
    if (shape.similarity_layers > 0) {
      work.redundancy_tokens = conditions.boundary;
      redundancy +=
          prompt / sample_steps * prompt / sample_steps * shape.similarity_layers / static_cast<double>(layers);
    }
  }

  /// Scores of all layers, held once for all cells that share them; and a copy of them and its order, of as many cells
  /// as there are threads, while their slots are divided.
  void add_ranking(const Cell& cell) {
    std::size_t ranked = 0;
    for (const auto& [first, count, plan] : cell.policy.plans(static_cast<int>(layers))) {
      if (plan.allocate->from != CountsFrom::all_layers && !plan.share.pools()) continue;
      const std::size_t scores =
          static_cast<std::size_t>(rows_of(plan.grouping.heads, largest.query_heads, largest.kv_heads)) * positions;
      ranked += scores * static_cast<std::size_t>(count);
      const Protection::Clamped by_rule = kept_by_rule(plan, cell.budget, conditions.boundary, question);
      const ScoreKey key = score_key(plan, scoring_of(plan, by_rule, cell.budget, conditions.boundary, question));
      for (int l = first; l < first + count; ++l)
        if (held_scores_.emplace(key, l).second || plan.score.name.empty()) ranking_bytes += scores * sizeof(double);
    }
    largest_copy = std::max(largest_copy, ranked * (sizeof(double) + sizeof(std::int32_t)));
    if (ranked > 0) ++copies;
  }

  void add_measurement(const Cell& cell, const Shape& shape, double share) {
    ++measured_cells;
    kept_share += share;
    work.parts.add(*cell.measure);
    if (!shape.general) return;
    work.comparisons = true;
    comparisons += static_cast<double>(conditions.eval_queries.size()) / sample_few_queries *
                   static_cast<double>(header.tokens()) / sample_tokens;
    // Values that go on changing are held in float64, too.
    stored_bytes = std::max(stored_bytes, vector_bytes(largest.kv_heads) * (shape.evolves ? 2 : 1));
  }

  void add_sets(const Shape& shape, double share) {
    set_bits += shape.rows * positions / 8 * layers;
    pairs |= shape.pairs;
    // Sets of a block of queries, a row each head; bounds of pages, two float64 a channel and some 16 tokens; keys in
    // float64 for the weights of tokens.
    if (shape.reads)
      read_bytes += static_cast<std::size_t>(largest.query_heads) * positions / 8 * sample_queries +
                    static_cast<std::size_t>(largest.kv_heads) * positions * static_cast<std::size_t>(largest.key_dim) *
                        (shape.weighs ? 1 + sizeof(double) : 1);
    if (shape.in_time)
      position_bytes += shape.rows * static_cast<std::size_t>(header.tokens()) * layers * sizeof(std::int32_t);
    position_bytes += static_cast<std::size_t>(share * prompt) * shape.rows * layers * sizeof(std::int32_t);
  }

  std::set<std::pair<ScoreKey, int>> held_scores_;  // of layers
};

/// Of one layer.
double layer_seconds(CallSeconds& seconds, const CellSums& cells, const Demand& demand) {
  const double tokens = cells.header.tokens();
  const double queries = static_cast<double>(cells.conditions.eval_queries.size());
  const double square = cells.prompt / sample_tokens * (cells.prompt / sample_tokens);
  const auto at_queries = [](double count, double visible) { return count / sample_queries * visible / sample_tokens; };
  const auto costs = [&](Call call, double times) { return times > 0 ? times * seconds(call, cells.largest) : 0.0; };
  const auto moments_at = [&](double blocks, MomentParts parts) {
    return costs(Call::moments, blocks) + costs(Call::sets, blocks * cells.measured_cells) +
           (parts.outputs ? costs(Call::outputs, blocks * (1 + cells.kept_share)) : 0.0) +
           // A projection has about as many rows as columns.
           (parts.vectors
                ? costs(Call::projection, queries / sample_queries * (1 + cells.measured_cells) *
                                              cells.largest.query_heads * cells.largest.value_dim / sample_tokens)
                : 0.0) +
           (parts.logits || parts.unaligned ? costs(Call::others, blocks * (1 + cells.measured_cells)) : 0.0);
  };
  double total = costs(Call::similarity, demand.similarity_passes * square) + cells.candidates * seconds_a_candidate;
  if (cells.cumulative) total += costs(Call::cumulative, square * demand.cumulative_share);
  if (cells.work.sets > 0) total += costs(Call::rows, at_queries(cells.window + queries, tokens));
  if (cells.measured_cells > 0) total += moments_at(at_queries(queries, tokens), cells.work.parts);
  total += costs(Call::comparison, cells.comparisons) + costs(Call::online, cells.online) +
           costs(Call::redundancy, cells.redundancy);
  if (demand.every_query) total += moments_at(at_queries(tokens, tokens / 2.0), {});
  return total;
}

/// Of the layer that needs most. Layers of one shape need the same.
std::size_t working_set(const Backend& backend, const Trace& trace, std::span<const int> layers, const Workload& work) {
  std::size_t most = 0;
  std::vector<LayerShape> shapes;
  for (const int layer : layers) {
    const LayerShape shape = trace.header().shape(layer);
    if (std::ranges::find(shapes, shape) != shapes.end()) continue;
    shapes.push_back(shape);
    most = std::max(most, backend.working_set(trace.layer(layer), work));
  }
  return most;
}

}  // namespace

double Estimator::seconds(const Trace& trace, const Conditions& conditions, std::span<const Cell> cells,
                          const Demand& demand) {
  if (cells.empty() && demand.similarity_passes == 0) return 0;
  const CellSums sums(trace, conditions, demand.save_scores, cells);
  // Reading from disk at 1 GB/s, slow enough for a cold cache on common drives.
  const auto replayed = static_cast<double>(conditions.replayed_layers().size());
  const double reading = static_cast<double>(trace.tensor_bytes()) * 1e-9 * (sums.second_walk ? 2.0 : 1.0) * replayed /
                         static_cast<double>(sums.layers);
  return std::max(layer_seconds(seconds_, sums, demand) * replayed, reading) + seconds_a_trace +
         seconds_a_cell * static_cast<double>(cells.size());
}

Estimate Estimator::operator()(const Trace& trace, const Conditions& conditions, std::span<const Cell> cells,
                               const Demand& demand) const {
  const CellSums sums(trace, conditions, demand.save_scores, cells);
  const std::size_t layers = sums.layers;
  const std::size_t positions = sums.positions;
  const auto query_heads = static_cast<std::size_t>(sums.largest.query_heads);

  Estimate total;
  const std::size_t values = cells.size() * (layers + 1) * (query_heads + 1) * lines_a_layer * sizeof(double);
  const std::size_t attention = demand.save_attention ? query_heads * positions * layers * sizeof(float) : 0;
  const std::size_t maps = 3 * positions * layers * sizeof(float);
  const std::size_t part = sums.position_bytes + sums.score_bytes + attention + maps + values;
  const std::size_t observables = 3 * query_heads * positions * sizeof(double);
  const std::size_t vector_bytes =
      sums.work.parts.vectors ? 2 * sizeof(float) * static_cast<std::size_t>(sums.largest.value_dim) : 0;
  const std::size_t moments = static_cast<std::size_t>(sums.measured_cells + 1) * query_heads * sample_queries *
                              (sizeof(Moments) + vector_bytes);
  const std::size_t copies_at_once = std::min(sums.copies, static_cast<std::size_t>(backend_.threads()));
  const std::size_t program = std::size_t{32} << 20;
  // A trace's file is made in memory, where it is copied as it grows, with what an earlier one has, and written at
  // once.
  total.memory_bytes = working_set(backend_, trace, conditions.layers, sums.work) + observables + moments +
                       sums.ranking_bytes + copies_at_once * sums.largest_copy + sums.stored_bytes + sums.read_bytes +
                       sums.angle_bytes + sums.repeated_bytes + 2 * sums.set_bits + 2 * (part + demand.earlier_bytes) +
                       program;
  std::size_t archived_bytes = 0;
  for (const int layer : conditions.layers) {
    archived_bytes = std::max(archived_bytes, trace.archived_bytes(layer));
    total.mapped_bytes = std::max(total.mapped_bytes, trace.mapped_bytes(layer));
  }
  // A layer, and the one that it is stored with.
  total.memory_bytes += archived_bytes * (sums.pairs ? 2 : 1);
  total.mapped_bytes *= sums.pairs ? 2 : 1;
  total.disk_bytes = part + demand.earlier_bytes + cells.size() * (layers + 1) * lines_a_layer * line_bytes;
  return total;
}

}  // namespace kvreplay
