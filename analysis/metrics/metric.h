// Metrics: what is measured, said once. A metric registers itself with its card; the type of a variant's measure says
// what it is computed from, and so what a run must provide for it.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "attention/backend.h"
#include "matrix.h"
#include "observables/layer_view.h"
#include "registry.h"
#include "replay/replay.h"
#include "trace/trace.h"

namespace kvreplay {

/// One treated layer of one cell.
struct LayerFacts {
  const LayerView& view;
  const LayerSelection& selection;
  const StoredLayer* stored = nullptr;  // what a store that changes tokens gives back; null: they are as they were
};

/// By row of the policy's granularity (empty: the metric has no rows), and for the layer.
struct LayerValues {
  std::vector<double> heads;
  double layer = 0;
};

double mean(std::span<const double> values);
double sum(std::span<const double> values);
double harmonic_mean(std::span<const double> values);

/// At one eval query and query head; averaged over the eval queries, then the heads, then the layers. `full` are the
/// moments of the set that keeps everything. What depends on ã has both functions: where kept keys moved or changed,
/// only the general comparison knows it.
struct AtQuery {
  double (*from_moments)(const Moments& kept, const Moments& full);
  double (*from_comparison)(const Comparison&) = nullptr;
  MomentParts reads = {};  // of the moments
  /// The value of a head from its values at the eval queries, which may be reordered; null: their mean.
  double (*over_queries)(std::span<double>) = nullptr;

  /// `compared` is null where kept keys are as they were.
  double operator()(const Moments& kept, const Moments& full, const Comparison* compared) const {
    return compared != nullptr && from_comparison != nullptr ? from_comparison(*compared) : from_moments(kept, full);
  }
};
struct OfMoments : AtQuery {};
/// sqrt(sum of `part` / sum of `whole`): of a head over its eval queries, of a layer over its query heads also. The
/// mean over layers.
struct OfPooledMoments {
  AtQuery part;
  AtQuery whole;
};
/// Euclidean norms at one eval query, all heads of a layer together, W_o the layer's output projection.
struct ProjectedOutput {
  double error = 0;   // ‖W_o(õ − o)‖
  double output = 0;  // ‖W_o o‖
  double input = 0;   // of the token's hidden state at the layer's input; 0 where it is not read
};
/// Of the layer's output as the residual stream gets it: averaged over the eval queries, then the layers.
struct OfProjectedOutput {
  double (*measure)(const ProjectedOutput&);
  bool reads_input = false;
};
/// As OfMoments, with every token of the trace as eval query: a pass of its own.
struct OfAllQueries : AtQuery {};
/// The recall of the best fixed set with the counts of the cell's rows: the largest sums of the eval queries'
/// attention. By query head, as OfMoments; NaN for a dynamic set.
struct OfBestSet {};
/// Of what each prompt token receives of the eval queries' attention (LayerView::eval_attention): by query head, as
/// OfMoments. NaN where it is undefined.
struct OfEvalAttention {
  std::vector<double> (*measure)(const LayerFacts&);
};
/// Of one layer's selection; `over_layers` makes the value of all layers.
struct OfLayer {
  LayerValues (*measure)(const LayerFacts&);
  double (*over_layers)(std::span<const double>) = mean;
};
/// The same at each eval query, averaged over the eval queries, then the layers.
struct OfLayerAtQuery {
  double (*measure)(const LayerFacts&, std::int32_t query);
};
/// As OfLayer, for each span of tokens below the boundary: the variant's full name is SPAN.NAME.
struct OfSpan {
  double (*measure)(const LayerFacts&, const Span&);
};
/// Of each such span in the selections of all treated layers together.
struct OfSpanInAllLayers {
  double (*measure)(std::span<const LayerSelection>, const Span&);
};
/// Of the selections of all treated layers; NaN: undefined.
struct OfCell {
  double (*measure)(std::span<const LayerSelection>);
};
/// [treated, treated], written beside the selections; no row of a table.
struct OfLayerPairs {
  Matrix (*measure)(std::span<const LayerSelection>);
};
/// Of a layer of the trace, whatever is kept: one value a token, averaged over the tokens, then the layers.
struct OfTrace {
  std::vector<double> (*measure)(const LayerView&, Backend&);
};
/// Wall time of one layer. Kept apart from all other results, so that these compare equal.
struct OfSeconds {
  double (*measure)(const CellSeconds&);
};

/// Of the live model that decodes with the kept sets: measured by `kvreplay live`, never by a replay.
struct OfLiveModel {
  bool of_text = false;  // of generated text (--generate)
};

using Measure =
    std::variant<OfMoments, OfPooledMoments, OfProjectedOutput, OfAllQueries, OfBestSet, OfEvalAttention, OfLayer,
                 OfLayerAtQuery, OfSpan, OfSpanInAllLayers, OfCell, OfLayerPairs, OfTrace, OfSeconds, OfLiveModel>;

/// Why a sample of the eval queries does not estimate the metric, such as "is a percentile"; empty: it does.
std::string why_no_sample_of_queries(const Measure& measure);
/// The same of a sample of the KV heads.
std::string why_no_sample_of_heads(const Measure& measure);
/// And of the layers.
std::string why_no_sample_of_layers(const Measure& measure);

/// Whether it is a mean of values at the eval queries, exactly or to first order.
bool is_mean_over_queries(const Measure& measure);

/// Which of two values is to be preferred, at the same budget. Sizes have no direction: the budget sets them.
enum class Better { neither, higher, lower };

struct MetricVariant {
  std::string name;  // empty: the metric itself
  std::string summary;
  Measure measure;
  bool by_default = false;  // computed when nothing is asked for
  // Where they are not the metric's.
  std::optional<Better> better = {};
  std::optional<std::string> unit = {};
};

struct MetricCard {
  std::string name;
  std::string summary;
  std::string unit;
  Better better = Better::neither;
  std::string formula;
  std::string source;  // paper and equation, or kvreplay
  std::string edges;   // what becomes of 0/0, of one token, of one layer
  std::vector<MetricVariant> variants;
};

Registry<MetricCard>& metrics();

/// Throws Error{usage} with the nearest name.
const MetricCard& metric_card(std::string_view name);

/// "higher", "lower", "neither".
const char* word(Better better);

struct RegisteredMetric {
  explicit RegisteredMetric(MetricCard card) { metrics().add(std::move(card)); }
};

/// "attention_recall:prompt" is {attention_recall, prompt}.
struct MetricName {
  std::string metric;
  std::string variant;

  std::string text() const { return variant.empty() ? metric : metric + ":" + variant; }
  friend auto operator<=>(const MetricName&, const MetricName&) = default;
};

/// Before the name of a metric of the live model, in titles and where a metric is named.
inline constexpr std::string_view live_prefix = "live.";

/// The short title that tables show for a metric, as "recall" for attention_recall; empty: it has none. Titles are
/// accepted wherever a metric is named. Every metric of the live model has one: live.NAME[:VARIANT], or a shorter one.
std::string title_of(const MetricName& name);
/// The metric with this title.
std::optional<MetricName> find_title(std::string_view title);
/// The titles in the order of the columns of a table.
std::vector<std::string> metric_titles();

/// What `--metrics` asks for: NAME[:VARIANT] or a title, with commas; empty: every metric in its default variants.
/// Throws Error{usage} with the nearest name. A span's variant is SPAN.any, or any for all spans. The variant of
/// a metric of the live model can also name a way of measuring.
std::vector<MetricName> parse_metrics(std::string_view text);
/// One metric. Throws Error{usage} at `where` for none or several.
MetricName parse_metric(const std::string& where, const std::string& text);
/// Metrics as parse_metrics() reads them, without those of the live model, for which it throws Error{usage} at `where`.
std::vector<MetricName> parse_replayed_metrics(const std::string& where, std::string_view text);

/// The variant's declaration, also of a span's variant; null when there is none.
const MetricVariant* find_variant(const MetricName& name);
/// The variant's measure, where it is of this kind; otherwise null.
template <class Of>
const Of* measure_as(const MetricName& name) {
  return std::get_if<Of>(&find_variant(name)->measure);
}

/// Whether it is measured for each span below the boundary.
bool is_of_span(const MetricName& name);
/// Whether it is measured in the live model.
bool is_live(const MetricCard& card);
bool is_live(const MetricName& name);

/// Of the variant, else of its metric.
Better better_of(const MetricCard& card, const MetricVariant& variant);
const std::string& unit_of(const MetricCard& card, const MetricVariant& variant);
/// A variant that is not declared, in a part of another version, has its metric's. Throws Error{usage} for a metric
/// that is not.
Better better_of(const MetricName& name);
const std::string& unit_of(const MetricName& name);

/// `asked` with each variant of spans spelled out for the spans below `boundary`, of equal names the first;
/// jaccard is always in it, and the recall of the best set beside any attention_recall. Sorted, unique.
std::vector<MetricName> metrics_of_trace(std::span<const MetricName> asked, std::span<const Span> spans, int boundary);

}  // namespace kvreplay
