// The engine's sink: what it hears becomes the values, sets and matrices of each cell, and the laws of self_check.h are
// held against all of it.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "analysis/metrics/metric.h"
#include "analysis/self_check.h"
#include "replay/replay.h"

namespace kvreplay {

/// Values of one metric and variant: [L+1, H+1] over the layers of the trace and the rows or query heads that the
/// metric has (H = 0: none). The last row is all layers, the last column all heads. NaN: undefined, or a layer that is
/// not treated, or a head that a layer does not have. [1, 1]: of the whole cell only.
using Values = Matrix;
using ValuesByMetric = std::map<MetricName, Values>;
/// By metric one value for each unit, an eval query or a layer. Their mean is the value of the metric: exactly, or to
/// first order where the metric is a root of quotients (linearised_root) or a harmonic mean (pseudo-values).
using ValuesByUnit = std::map<MetricName, std::vector<double>>;

/// What is wanted of one cell.
struct Wanted {
  std::vector<MetricName> metrics;  // spelled out by metrics_of_trace
  int budget = 0;                   // tokens; 0: none is held against the cell
  bool scores = false;
  bool by_query = false;
  Heads heads = Heads::layer;  // the finest granularity of its layers

  /// What its metrics read of the moments of the eval queries, or of those of all queries; none: nothing.
  std::optional<MomentParts> moments() const;
  std::optional<MomentParts> moments_of_all_queries() const;
};

struct CellResult {
  std::vector<LayerSelection> selections;  // [replayed], each its own source where layers are sampled
  std::vector<CellSeconds> seconds;        // [replayed]
  ValuesByMetric values;
  ValuesByUnit by_head;   // [replayed, sampled KV heads] where these are sampled, of metrics of query heads
  ValuesByUnit by_query;  // when wanted, of metrics that differ between eval queries
  std::map<std::string, Matrix> matrices;  // [replayed, replayed], by variant of jaccard_matrix
  std::vector<float> scores;               // [L, H, P] when wanted, NaN where a layer has none
  std::optional<Violation> violation;      // the first
  std::string error;                       // why it could not go on; then there is nothing else
};

/// What is wanted of the trace itself.
struct WantedOfTrace {
  std::vector<MetricName> metrics;
  bool eval_attention = false;
  bool eval_attention_by_head = false;
};

struct TraceResult {
  ValuesByMetric values;
  std::map<MetricName, std::vector<float>> tokens;  // [L, P] behind the values; NaN where a layer is not treated
  std::vector<float> eval_attention;                // [L, P] mean over query heads; sums over eval queries
  std::vector<float> eval_attention_by_head;        // [L, Hq, P]
  std::vector<double> observable_seconds;           // [replayed]
};

/// Functions of the moments at `queries` eval queries, reduced to one value by replayed layer and query head. Means are
/// summed in the order of the queries. A layer is added whole before the next one begins. `summed_queries`: eval
/// queries whose sums over the heads of each layer are held as well, all or 0.
class MomentMeans {
 public:
  MomentMeans() = default;
  MomentMeans(std::vector<AtQuery> functions, int layers, int query_heads, std::size_t queries,
              std::size_t summed_queries = 0);
  /// Of a block of eval queries, the first of which has the number `first`. `compared` is empty where kept keys are as
  /// they were.
  void add(int layer, int head, int first, std::span<const Moments> kept, std::span<const Moments> full,
           std::span<const Comparison> compared = {});
  /// [replayed, Hq] of one function.
  Matrix means(std::size_t function) const;
  /// [replayed, queries] of one function: sums over the query heads.
  const Matrix& sums_of_heads(std::size_t function) const { return sums_of_heads_[function]; }

 private:
  std::vector<AtQuery> functions_;
  std::size_t queries_ = 0;
  std::vector<Matrix> sums_of_heads_;
  std::vector<Matrix> sums_;  // or, of functions with over_queries, what this makes of a head's values
  std::vector<std::vector<std::vector<double>>> values_;  // [functions][Hq] of the layer under way: for over_queries
};

/// The layers of a trace that a replay measures, by their stored numbers, and the query heads of each that it measures.
struct MeasuredLayers {
  std::vector<int> layers;
  std::vector<std::vector<int>> heads;

  MeasuredLayers(const TraceHeader& header, const Conditions& conditions);
  /// The number of the layer among them.
  std::size_t number(const LayerView& view) const;
};

/// General comparisons of the block of queries under way, by cell: [Hq, count].
using Comparisons = std::map<int, std::vector<Comparison>>;

class Measurement final : public Sink {
 public:
  /// `heard` is told the share of this trace that is done and the treated layers finished in this walk.
  Measurement(const Trace& trace, const Conditions& conditions, std::vector<Wanted> wanted, WantedOfTrace of_trace,
              std::function<void(double, int)> heard = {});

  void layer(const LayerView& view, Backend& backend) override;
  void failed(int cell, const Error& error) override;
  void scored(const LayerView& view, int cell, const Matrix& scores) override;
  void selected(const LayerView& view, int cell, const LayerSelection& selection, const StoredLayer* stored,
                const CellSeconds& seconds) override;
  void compared(const LayerView& view, int cell, int first, int count,
                std::span<const Comparison> comparisons) override;
  void measured(const LayerView& view, std::span<const int> cells, int first, int count,
                const KeptMoments& moments) override;
  void cross_checked(const LayerView& view, int cell, int query, int head, const Comparison& comparison) override;
  void layer_done(const LayerView& view, int walk, int walks) override;

  /// After the replay; each once.
  CellResult take_cell(int cell);
  TraceResult take_trace();

 private:
  /// Rows of a granularity in one layer, and in the layer that has most.
  struct Rows {
    int own = 0;
    int most = 0;
  };
  Rows rows(const LayerView& view, Heads heads) const;
  void set_layer(Values& values, const LayerValues& of_layer, Rows rows, int stored_layer) const;
  void note(int cell, std::optional<Violation> violation, const LayerView& view, int head);
  RecallByAttention& expecting(const LayerView& view);
  void add_projected(const LayerView& view, std::span<const int> cells, int first, int count,
                     const OutputVectors& outputs);
  void add_to_queries(int cell, const MetricName& name, int first, std::span<const double> values);
  LayerValues recall_of_best_set(const LayerView& view, const LayerSelection& selection);

  const Trace& trace_;
  const Conditions& conditions_;
  const LayerShape largest_;  // of the treated layers
  const MeasuredLayers measured_;
  std::vector<Wanted> wanted_;
  WantedOfTrace of_trace_;
  std::function<void(double, int)> heard_;
  std::vector<CellResult> results_;
  std::vector<MomentMeans> means_;                                     // of what is wanted
  std::vector<std::map<MetricName, std::vector<double>>> projected_;   // [cell], [replayed] sums over the eval queries
  std::vector<std::map<MetricName, std::vector<double>>> of_queries_;  // [cell], [queries] sums over layers, as wanted
  std::vector<MomentMeans> recall_;  // of every measured cell, wanted or not: it is held against the oracle
  std::vector<std::vector<std::vector<ExpectedRecall>>> expected_;  // [cell][replayed][H]
  std::optional<RecallByAttention> expecting_;                      // of the layer under way
  TraceResult trace_result_;
  struct Block {
    std::vector<int> cells;
    int first = 0;
    int count = 0;
    MomentParts parts;
    std::span<const Moments> full, kept;  // as `measured` heard them
  } block_;
  Comparisons comparisons_;
};

/// A second pass with every token as eval query, for the metrics of OfAllQueries: nothing else is heard.
class AllQueriesMeasurement final : public Sink {
 public:
  AllQueriesMeasurement(const Trace& trace, const Conditions& conditions, std::vector<Wanted> wanted,
                        std::function<void(double, int)> heard = {});
  void compared(const LayerView& view, int cell, int first, int count,
                std::span<const Comparison> comparisons) override;
  void measured(const LayerView& view, std::span<const int> cells, int first, int count,
                const KeptMoments& moments) override;
  void layer_done(const LayerView& view, int walk, int walks) override;
  ValuesByMetric take_cell(int cell) const;

  static bool wanted_by(const Wanted& wanted) { return wanted.moments_of_all_queries().has_value(); }

 private:
  const Trace& trace_;
  const MeasuredLayers measured_;
  std::vector<Wanted> wanted_;
  std::vector<MomentMeans> means_;
  Comparisons comparisons_;
  std::function<void(double, int)> heard_;
};

/// [treated] from the selections of the replayed layers; those of other layers are empty.
std::vector<LayerSelection> at_treated_layers(const Conditions& conditions, std::vector<LayerSelection> replayed);

/// "kv", "query" or "layer", and back.
const char* word(Heads heads);
Heads heads_of(std::string_view word);

}  // namespace kvreplay
