#include "analysis/measurement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "analysis/metrics/quotients.h"
#include "analysis/sampling_error.h"
#include "float_types.h"
#include "observables/logits.h"
#include "observables/projected_outputs.h"
#include "parallel.h"
#include "policies/selection.h"
#include "profile.h"
#include "replay/trace_inputs.h"

namespace kvreplay {
namespace {

constexpr double undefined = std::numeric_limits<double>::quiet_NaN();

/// Functions of the moments whose reductions over the queries make the metric; none: it is of another kind.
template <class Of>
std::vector<AtQuery> functions_of(const MetricName& name) {
  if (const auto* of = measure_as<Of>(name)) return {*of};
  if constexpr (std::is_same_v<Of, OfMoments>)
    if (const auto* pooled = measure_as<OfPooledMoments>(name)) return {pooled->part, pooled->whole};
  return {};
}

/// What metrics of this kind read of the moments; none: there are no such metrics.
template <class Of>
std::optional<MomentParts> parts_read(std::span<const MetricName> names) {
  std::optional<MomentParts> parts;
  for (const MetricName& name : names)
    for (const AtQuery& function : functions_of<Of>(name)) {
      if (!parts) parts.emplace();
      parts->add(function.reads);
    }
  return parts;
}

LayerValues without_heads(double layer) {
  LayerValues values;
  values.layer = layer;
  return values;
}

/// Row l of the values, where the layer has `rows` rows if the metric has any: a coarser one stands for those that
/// share it. The matrix is made when its first layer is known, for `most` rows.
void set_row(Values& values, const LayerValues& of_layer, int rows, int most, int stored_layer, int layers) {
  const int own = static_cast<int>(of_layer.heads.size());
  const int columns = own == 0 ? 0 : most;
  if (values.empty()) values = Values(layers + 1, columns + 1, undefined);
  for (int h = 0; own > 0 && h < rows; ++h)
    values(stored_layer, h) = of_layer.heads[static_cast<std::size_t>(h / (rows / own))];
  values(stored_layer, columns) = of_layer.layer;
}

/// The row of all layers, from those of the replayed ones.
void set_all_layers(Values& values, std::span<const int> replayed, double (*over_layers)(std::span<const double>)) {
  for (int column = 0; column < values.columns(); ++column) {
    std::vector<double> by_layer;
    for (const int layer : replayed) by_layer.push_back(values(layer, column));
    values(values.rows() - 1, column) = over_layers(by_layer);
  }
}

/// "needle.any" is of the span "needle".
const Span* span_of(const MetricName& name, std::span<const Span> spans) {
  return find_span(spans, name.variant.substr(0, name.variant.rfind('.')));
}

LayerValues mean_of_heads(std::vector<double> heads) {
  const double layer = mean(heads);
  return {std::move(heads), layer};
}

/// A root of quotients of sums over all eval queries. Each query has the weight of its moments, and each head.
LayerValues pooled(std::span<const double> parts, std::span<const double> wholes) {
  const auto root = [](double part, double whole) { return std::sqrt(quotient(part, whole, 0.0)); };
  LayerValues values;
  for (std::size_t head = 0; head < parts.size(); ++head) values.heads.push_back(root(parts[head], wholes[head]));
  values.layer = root(sum(parts), sum(wholes));
  return values;
}

/// Of the measured heads of layer l, by its number.
std::vector<double> of_heads(const Matrix& function, const MeasuredLayers& measured, std::size_t l) {
  std::vector<double> values;
  for (const int head : measured.heads[l]) values.push_back(function(static_cast<int>(l), head));
  return values;
}

/// [L+1, Hq+1] from the functions' reductions [replayed, Hq] over the eval queries. NaN for heads that are not
/// measured.
Values values_by_head(std::span<const Matrix> functions, const MeasuredLayers& measured, const TraceHeader& header) {
  Values values;
  for (std::size_t l = 0; l < measured.layers.size(); ++l) {
    const int own = header.shape(measured.layers[l]).query_heads;
    const std::vector<double> first = of_heads(functions.front(), measured, l);
    const LayerValues found =
        functions.size() == 1 ? mean_of_heads(first) : pooled(first, of_heads(functions[1], measured, l));
    LayerValues at_heads{std::vector<double>(static_cast<std::size_t>(own), undefined), found.layer};
    for (std::size_t i = 0; i < found.heads.size(); ++i)
      at_heads.heads[static_cast<std::size_t>(measured.heads[l][i])] = found.heads[i];
    set_row(values, at_heads, own, functions.front().columns(), measured.layers[l], header.layers);
  }
  set_all_layers(values, measured.layers, mean);
  return values;
}

/// [queries] from the functions' sums over the heads of each layer, [replayed, queries].
std::vector<double> values_by_query(std::span<const Matrix* const> functions, const MeasuredLayers& measured) {
  std::vector<double> values(static_cast<std::size_t>(functions.front()->columns()));
  for (int l = 0; l < functions.front()->rows(); ++l) {
    const std::span<const double> sums = functions.front()->row(l);
    const auto heads = static_cast<double>(measured.heads[static_cast<std::size_t>(l)].size());
    const std::vector<double> roots =
        functions.size() > 1 ? linearised_root(sums, functions[1]->row(l)) : std::vector<double>();
    for (std::size_t q = 0; q < values.size(); ++q) values[q] += roots.empty() ? sums[q] / heads : roots[q];
  }
  for (double& value : values) value /= functions.front()->rows();
  return values;
}

/// Means over the query heads of each KV head.
std::vector<double> by_kv_head(std::span<const double> of_query_heads, std::size_t group) {
  std::vector<double> values;
  for (std::size_t head = 0; head < of_query_heads.size(); head += group)
    values.push_back(mean(of_query_heads.subspan(head, group)));
  return values;
}

/// [replayed, measured KV heads] values whose mean in each layer is that of the layer, exactly or to first order.
std::vector<double> values_by_kv_head(std::span<const Matrix> functions, const MeasuredLayers& measured,
                                      const TraceHeader& header) {
  std::vector<double> all;
  for (std::size_t l = 0; l < measured.layers.size(); ++l) {
    const LayerShape shape = header.shape(measured.layers[l]);
    const auto of = [&](const Matrix& function) {
      return by_kv_head(of_heads(function, measured, l), static_cast<std::size_t>(shape.query_heads / shape.kv_heads));
    };
    const std::vector<double> first = of(functions.front());
    const std::vector<double> values = functions.size() == 1 ? first : linearised_root(first, of(functions[1]));
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

Values single(double value) { return Values(1, 1, value); }

/// The part of [L, rows, P] that belongs to one row.
std::span<float> row_of(std::vector<float>& tokens, int rows, int prompt, int layer, int row) {
  const std::size_t width = static_cast<std::size_t>(prompt);
  const std::size_t index =
      static_cast<std::size_t>(layer) * static_cast<std::size_t>(rows) + static_cast<std::size_t>(row);
  return std::span(tokens).subspan(index * width, width);
}

std::vector<float> undefined_tokens(int layers, int rows, int prompt) {
  return std::vector<float>(
      static_cast<std::size_t>(layers) * static_cast<std::size_t>(rows) * static_cast<std::size_t>(prompt),
      std::numeric_limits<float>::quiet_NaN());
}

void copy_as_float(std::span<const double> from, std::span<float> to) {
  std::ranges::transform(from, to.begin(), [](double value) { return static_cast<float>(value); });
}

/// Where the moments of one cell, query head and query of a block lie.
std::size_t place(std::size_t cell, int query_heads, int head, int count, int query) {
  return (cell * static_cast<std::size_t>(query_heads) + static_cast<std::size_t>(head)) *
             static_cast<std::size_t>(count) +
         static_cast<std::size_t>(query);
}

template <class Of>
MomentMeans means_of(const Wanted& wanted, const Conditions& conditions, int query_heads) {
  std::vector<AtQuery> functions;
  for (const MetricName& name : wanted.metrics)
    std::ranges::copy(functions_of<Of>(name), std::back_inserter(functions));
  const std::size_t queries = conditions.eval_queries.size();
  return {std::move(functions), static_cast<int>(conditions.replayed_layers().size()), query_heads, queries,
          wanted.by_query ? queries : 0};
}

/// Calls visit(name, functions) for each metric of this kind; `functions`: what read(i) gives for the metric's
/// functions i, numbered over all metrics of this kind.
template <class Of, class Read, class Visit>
void for_each_metric(const Wanted& wanted, Read read, Visit visit) {
  std::size_t next = 0;
  for (const MetricName& name : wanted.metrics) {
    std::vector<decltype(read(next))> functions;
    for (std::size_t count = functions_of<Of>(name).size(); count > 0; --count) functions.push_back(read(next++));
    if (!functions.empty()) visit(name, functions);
  }
}

template <class Of>
void add_values(ValuesByMetric& values, const Wanted& wanted, const MomentMeans& means, const MeasuredLayers& measured,
                const TraceHeader& header) {
  for_each_metric<Of>(
      wanted, [&](std::size_t function) { return means.means(function); },
      [&](const MetricName& name, std::span<const Matrix> functions) {
        values[name] = values_by_head(functions, measured, header);
      });
}

void add_by_head(ValuesByUnit& values, const Wanted& wanted, const MomentMeans& means, const MeasuredLayers& measured,
                 const TraceHeader& header) {
  for_each_metric<OfMoments>(
      wanted, [&](std::size_t function) { return means.means(function); },
      [&](const MetricName& name, std::span<const Matrix> functions) {
        values[name] = values_by_kv_head(functions, measured, header);
      });
}

void add_by_query(ValuesByUnit& values, const Wanted& wanted, const MomentMeans& means,
                  const MeasuredLayers& measured) {
  for_each_metric<OfMoments>(
      wanted, [&](std::size_t function) { return &means.sums_of_heads(function); },
      [&](const MetricName& name, std::span<const Matrix* const> functions) {
        values[name] = values_by_query(functions, measured);
      });
}

/// Adds a block of eval queries of cell i of `cells`.
void add_block(std::vector<MomentMeans>& means, const LayerView& view, const MeasuredLayers& measured,
               std::span<const int> cells, std::size_t i, int first, int count, const KeptMoments& moments,
               const Comparisons& comparisons) {
  const std::size_t layer = measured.number(view);
  const auto general = comparisons.find(cells[i]);
  for (const int head : measured.heads[layer]) {
    const auto queries_of = [&]<class Element>(const std::vector<Element>& all, std::size_t cell) {
      return std::span(all).subspan(place(cell, view.query_heads(), head, count, 0), static_cast<std::size_t>(count));
    };
    means[static_cast<std::size_t>(cells[i])].add(
        static_cast<int>(layer), head, first, queries_of(moments.kept, i), queries_of(moments.full, 0),
        general == comparisons.end() ? std::span<const Comparison>() : queries_of(general->second, 0));
  }
}

double share_done(const LayerView& view, int walk, int walks) {
  return (walk + static_cast<double>(view.layer() + 1) / view.layers()) / walks;
}

}  // namespace

std::optional<MomentParts> Wanted::moments() const {
  std::optional<MomentParts> parts = parts_read<OfMoments>(metrics);
  if (std::ranges::any_of(metrics, measure_as<OfProjectedOutput>)) {
    if (!parts) parts.emplace();
    parts->add({.outputs = true, .vectors = true});
  }
  return parts;
}

std::optional<MomentParts> Wanted::moments_of_all_queries() const { return parts_read<OfAllQueries>(metrics); }

MeasuredLayers::MeasuredLayers(const TraceHeader& header, const Conditions& conditions) {
  for (const int layer : conditions.replayed_layers()) {
    const auto l = static_cast<std::size_t>(layer);
    const LayerShape shape = header.shape(layers.emplace_back(conditions.layers[l]));
    const int group = shape.query_heads / shape.kv_heads;
    std::vector<int>& own = heads.emplace_back();
    for (int head = 0; head < shape.query_heads; ++head)
      if (conditions.sampled_heads.empty() || std::ranges::binary_search(conditions.sampled_heads[l], head / group))
        own.push_back(head);
  }
}

std::size_t MeasuredLayers::number(const LayerView& view) const {
  return static_cast<std::size_t>(std::ranges::lower_bound(layers, view.stored_layer()) - layers.begin());
}

MomentMeans::MomentMeans(std::vector<AtQuery> functions, int layers, int query_heads, std::size_t queries,
                         std::size_t summed_queries)
    : functions_(std::move(functions)),
      queries_(queries),
      sums_of_heads_(functions_.size(), Matrix(layers, static_cast<int>(summed_queries))),
      sums_(functions_.size(), Matrix(layers, query_heads)),
      values_(functions_.size(), std::vector<std::vector<double>>(static_cast<std::size_t>(query_heads))) {}

void MomentMeans::add(int layer, int head, int first, std::span<const Moments> kept, std::span<const Moments> full,
                      std::span<const Comparison> compared) {
  for (std::size_t f = 0; f < functions_.size(); ++f) {
    const AtQuery& function = functions_[f];
    double& sum = sums_[f](layer, head);
    std::vector<double>& values = values_[f][static_cast<std::size_t>(head)];
    for (std::size_t q = 0; q < kept.size(); ++q) {
      const double value = function(kept[q], full[q], compared.empty() ? nullptr : &compared[q]);
      if (sums_of_heads_[f].columns() > 0) sums_of_heads_[f](layer, first + static_cast<int>(q)) += value;
      if (function.over_queries == nullptr)
        sum += value;
      else
        values.push_back(value);
    }
    if (function.over_queries == nullptr || values.size() < queries_) continue;
    sum = function.over_queries(values);
    values.clear();
  }
}

Matrix MomentMeans::means(std::size_t function) const {
  Matrix result = sums_[function];
  if (functions_[function].over_queries == nullptr)
    for (double& value : result.values()) value /= static_cast<double>(queries_);
  return result;
}

Measurement::Measurement(const Trace& trace, const Conditions& conditions, std::vector<Wanted> wanted,
                         WantedOfTrace of_trace, std::function<void(double, int)> heard)
    : trace_(trace),
      conditions_(conditions),
      largest_(trace.header().largest_shape(conditions.layers)),
      measured_(trace.header(), conditions),
      wanted_(std::move(wanted)),
      of_trace_(std::move(of_trace)),
      heard_(std::move(heard)),
      results_(wanted_.size()),
      of_queries_(wanted_.size()),
      expected_(wanted_.size(), std::vector<std::vector<ExpectedRecall>>(measured_.layers.size())) {
  const TraceHeader& header = trace.header();
  const AtQuery recall{measure_as<OfMoments>({"attention_recall", ""})->from_moments};
  for (std::size_t c = 0; c < wanted_.size(); ++c) {
    means_.push_back(means_of<OfMoments>(wanted_[c], conditions, largest_.query_heads));
    recall_.emplace_back(std::vector{recall}, static_cast<int>(measured_.layers.size()), largest_.query_heads,
                         conditions.eval_queries.size());
    projected_.emplace_back();
    for (const MetricName& name : wanted_[c].metrics)
      if (measure_as<OfProjectedOutput>(name) != nullptr) projected_[c][name].resize(measured_.layers.size());
    if (wanted_[c].by_query)
      for (const MetricName& name : wanted_[c].metrics)
        if (measure_as<OfProjectedOutput>(name) != nullptr || measure_as<OfLayerAtQuery>(name) != nullptr)
          of_queries_[c][name].resize(conditions.eval_queries.size());
    results_[c].selections.resize(measured_.layers.size());
    results_[c].seconds.resize(measured_.layers.size());
  }
  trace_result_.observable_seconds.resize(measured_.layers.size());
  for (const MetricName& name : of_trace_.metrics)
    trace_result_.tokens[name] = undefined_tokens(header.layers, 1, conditions.boundary);
  if (of_trace_.eval_attention) trace_result_.eval_attention = undefined_tokens(header.layers, 1, conditions.boundary);
  if (of_trace_.eval_attention_by_head)
    trace_result_.eval_attention_by_head = undefined_tokens(header.layers, largest_.query_heads, conditions.boundary);
}

Measurement::Rows Measurement::rows(const LayerView& view, Heads heads) const {
  return {view.rows(heads), rows_of(heads, largest_.query_heads, largest_.kv_heads)};
}

void Measurement::set_layer(Values& values, const LayerValues& of_layer, Rows rows, int stored_layer) const {
  set_row(values, of_layer, rows.own, rows.most, stored_layer, trace_.header().layers);
}

void Measurement::layer(const LayerView& view, Backend& backend) {
  const int prompt = view.prompt();
  for (const MetricName& name : of_trace_.metrics) {
    const Timed timed(Work::metric, name.text());
    const std::vector<double> tokens = measure_as<OfTrace>(name)->measure(view, backend);
    copy_as_float(tokens, row_of(trace_result_.tokens[name], 1, prompt, view.stored_layer(), 0));
    set_layer(trace_result_.values[name], without_heads(mean(tokens)), {}, view.stored_layer());
  }
  if (of_trace_.eval_attention) {
    const Matrix& sums = view.eval_attention();
    const std::span<float> tokens = row_of(trace_result_.eval_attention, 1, prompt, view.stored_layer(), 0);
    for (int j = 0; j < prompt; ++j) {
      double total = 0;
      for (int head = 0; head < sums.rows(); ++head) total += sums(head, j);
      tokens[static_cast<std::size_t>(j)] = static_cast<float>(total / sums.rows());
    }
  }
  if (of_trace_.eval_attention_by_head)
    for (int head = 0; head < view.query_heads(); ++head)
      copy_as_float(view.eval_attention().row(head), row_of(trace_result_.eval_attention_by_head, largest_.query_heads,
                                                            prompt, view.stored_layer(), head));
}

void Measurement::failed(int cell, const Error& error) {
  results_[static_cast<std::size_t>(cell)].error = error.what();
}

void Measurement::scored(const LayerView& view, int cell, const Matrix& scores) {
  const std::size_t c = static_cast<std::size_t>(cell);
  if (!wanted_[c].scores || scores.empty()) return;
  std::vector<float>& all = results_[c].scores;
  const int most = rows(view, wanted_[c].heads).most;
  if (all.empty()) all = undefined_tokens(trace_.header().layers, most, view.prompt());
  for (int row = 0; row < scores.rows(); ++row)
    copy_as_float(scores.row(row), row_of(all, most, view.prompt(), view.stored_layer(), row));
}

void Measurement::selected(const LayerView& view, int cell, const LayerSelection& selection, const StoredLayer* stored,
                           const CellSeconds& seconds) {
  const std::size_t c = static_cast<std::size_t>(cell);
  const auto l = measured_.number(view);
  CellResult& result = results_[c];
  result.selections[l] = selection;
  if (!conditions_.sampled_layers.empty()) result.selections[l].source = static_cast<int>(l);
  result.seconds[l] = seconds;
  const LayerFacts facts{view, selection, stored};
  const int layer = view.stored_layer();
  for (const MetricName& name : wanted_[c].metrics) {
    const Timed timed(Work::metric, name.metric);
    const Measure& measure = find_variant(name)->measure;
    if (const auto* of = std::get_if<OfLayer>(&measure))
      set_layer(result.values[name], of->measure(facts), rows(view, wanted_[c].heads), layer);
    if (const auto* of = std::get_if<OfLayerAtQuery>(&measure)) {
      std::vector<double> at_queries;
      for (const std::int32_t query : view.eval_queries()) at_queries.push_back(of->measure(facts, query));
      set_layer(result.values[name], without_heads(mean(at_queries)), rows(view, wanted_[c].heads), layer);
      add_to_queries(cell, name, 0, at_queries);
    }
    if (std::holds_alternative<OfBestSet>(measure))
      set_layer(result.values[name], recall_of_best_set(view, selection), rows(view, Heads::query), layer);
    if (const auto* of = std::get_if<OfEvalAttention>(&measure))
      set_layer(result.values[name], mean_of_heads(of->measure(facts)), rows(view, Heads::query), layer);
    if (const auto* of = std::get_if<OfSpan>(&measure))
      if (const Span* span = span_of(name, trace_.header().spans))
        set_layer(result.values[name], without_heads(of->measure(facts, *span)), {}, layer);
  }
  const Timed timed(Work::metric, "expected recall");
  if (!selection.differs_by_query() && wanted_[c].moments()) expected_[c][l] = expecting(view).of(selection.set);
}

/// Adds a layer's values at eval queries from `first` on.
void Measurement::add_to_queries(int cell, const MetricName& name, int first, std::span<const double> values) {
  const auto found = of_queries_[static_cast<std::size_t>(cell)].find(name);
  if (found == of_queries_[static_cast<std::size_t>(cell)].end()) return;
  for (std::size_t i = 0; i < values.size(); ++i) found->second[static_cast<std::size_t>(first) + i] += values[i];
}

RecallByAttention& Measurement::expecting(const LayerView& view) {
  return expecting_ ? *expecting_ : expecting_.emplace(view);
}

LayerValues Measurement::recall_of_best_set(const LayerView& view, const LayerSelection& selection) {
  std::vector<double> heads(static_cast<std::size_t>(view.query_heads()), undefined);
  if (!selection.differs_by_query()) heads = expecting(view).of_best_set(selection.set);
  return mean_of_heads(std::move(heads));
}

void Measurement::compared(const LayerView&, int cell, int, int, std::span<const Comparison> comparisons) {
  comparisons_[cell].assign(comparisons.begin(), comparisons.end());
}

void Measurement::note(int cell, std::optional<Violation> violation, const LayerView& view, int head) {
  std::optional<Violation>& first = results_[static_cast<std::size_t>(cell)].violation;
  if (!violation || first) return;
  first = std::move(violation);
  first->stored_layer = view.stored_layer();
  first->head = head;
}

void Measurement::measured(const LayerView& view, std::span<const int> cells, int first, int count,
                           const KeptMoments& moments) {
  const Timed timed(Work::metric, "means over queries");
  // All that is shown is relative to the full attention: without it there is nothing to say of any cell.
  if (!std::ranges::all_of(moments.full, is_finite))
    throw Error{Refusal::input, fmt::format("{}:/layers/{:03}", trace_.path().string(), view.stored_layer()),
                "attention is NaN (run kvreplay validate --deep to find the tensor)", "finite queries, keys and values",
                "NaN or Inf"};
  all_side_by_side(view.backend().threads(), cells.size(), [&](std::size_t i) {
    add_block(means_, view, measured_, cells, i, first, count, moments, comparisons_);
    add_block(recall_, view, measured_, cells, i, first, count, moments, comparisons_);
    const LayerSelection& selection = results_[static_cast<std::size_t>(cells[i])].selections[measured_.number(view)];
    const KeptSet& set = selection.set;
    for (const int head : measured_.heads[measured_.number(view)]) {
      const bool keeps_everything =
          !selection.differs_by_query() && set.count(set.row_of(head, view.group())) == set.tokens();
      for (int query = 0; query < count; ++query)
        note(cells[i],
             check_moments(moments.kept[place(i, view.query_heads(), head, count, query)],
                           moments.full[place(0, view.query_heads(), head, count, query)], keeps_everything),
             view, head);
    }
  });
  comparisons_.clear();
  add_projected(view, cells, first, count, moments.outputs);
  block_.cells.assign(cells.begin(), cells.end());
  block_.first = first;
  block_.count = count;
  block_.parts = moments.parts;
  block_.full = moments.full;
  block_.kept = moments.kept;
}

void Measurement::add_projected(const LayerView& view, std::span<const int> cells, int first, int count,
                                const OutputVectors& outputs) {
  if (outputs.full.empty()) return;
  const Timed timed(Work::metric, "projected outputs");
  const TensorView projection = output_projection(trace_, view.stored_layer());
  const TensorView inputs = input_norms(trace_, view.stored_layer());
  const auto squares = [&](std::span<const float> vectors) {
    return projected_squares(projection, vectors, view.query_heads(), count, view.backend().threads());
  };
  const std::vector<double> of_outputs = squares(outputs.full);
  const std::vector<double> of_errors = squares(outputs.errors);
  for (std::size_t i = 0; i < cells.size(); ++i) {
    for (auto& [name, sums] : projected_[static_cast<std::size_t>(cells[i])]) {
      const OfProjectedOutput& of = *measure_as<OfProjectedOutput>(name);
      double& sum = sums[measured_.number(view)];
      std::vector<double> values;
      for (int query = 0; query < count; ++query) {
        const auto position = static_cast<std::size_t>(view.eval_queries()[static_cast<std::size_t>(first + query)]);
        values.push_back(
            of.measure({.error = std::sqrt(of_errors[place(i, 1, 0, count, query)]),
                        .output = std::sqrt(of_outputs[static_cast<std::size_t>(query)]),
                        .input = of.reads_input ? static_cast<double>(load(inputs.data, inputs.dtype, position)) : 0}));
        sum += values.back();
      }
      add_to_queries(cells[i], name, first, values);
    }
  }
}

void Measurement::cross_checked(const LayerView& view, int cell, int query, int head, const Comparison& comparison) {
  const auto found = std::ranges::find(block_.cells, cell);
  if (found == block_.cells.end() || query < block_.first || query >= block_.first + block_.count)
    throw Error{Refusal::internal, "measurement", "a comparison outside the block measured last"};
  const auto i = static_cast<std::size_t>(found - block_.cells.begin());
  const int in_block = query - block_.first;
  const Moments& kept = block_.kept[place(i, view.query_heads(), head, block_.count, in_block)];
  const Moments& full = block_.full[place(0, view.query_heads(), head, block_.count, in_block)];
  const auto check = [&](double logit) { return check_comparison(comparison, kept, full, block_.parts, logit); };
  if (!check(0)) return;
  // Logits are read again where they may say why.
  const std::int32_t position = view.eval_queries()[static_cast<std::size_t>(query)];
  note(cell, check(largest_logit(view.tensors(), position, head)), view, head);
}

void Measurement::layer_done(const LayerView& view, int walk, int walks) {
  const auto l = measured_.number(view);
  trace_result_.observable_seconds[l] += view.observable_seconds();
  for (CellResult& result : results_) result.selections[l].reads = {};  // which read the layer
  for (std::size_t c = 0; c < wanted_.size(); ++c) {
    if (expected_[c][l].empty() || !results_[c].error.empty()) continue;
    const Matrix recalls = recall_[c].means(0);
    const KeptSet& set = results_[c].selections[l].set;
    for (int row = 0; row < set.rows(); ++row) {
      std::vector<double> of_row;
      for (const int head : measured_.heads[l])
        if (set.row_of(head, view.group()) == row) of_row.push_back(recalls(static_cast<int>(l), head));
      if (std::ssize(of_row) < view.query_heads() / set.rows()) continue;  // some heads are not measured
      const auto check = [&](double logit) {
        return check_recall(expected_[c][l][static_cast<std::size_t>(row)], mean(of_row), logit);
      };
      if (!check(0)) continue;
      double largest = 0;
      for (int head = 0; head < view.query_heads(); ++head)
        for (const std::int32_t query : view.eval_queries())
          if (set.row_of(head, view.group()) == row)
            largest = std::max(largest, largest_logit(view.tensors(), query, head));
      note(static_cast<int>(c), check(largest), view, row);
    }
    expected_[c][l].clear();
  }
  expecting_.reset();
  if (heard_) heard_(share_done(view, walk, walks), view.layer() + 1);
}

CellResult Measurement::take_cell(int cell) {
  const std::size_t c = static_cast<std::size_t>(cell);
  const Wanted& wanted = wanted_[c];
  CellResult result = std::move(results_[c]);
  if (!result.error.empty()) return result;
  for (const auto& [name, sums] : projected_[c])
    for (std::size_t l = 0; l < sums.size(); ++l)
      set_layer(result.values[name], without_heads(sums[l] / static_cast<double>(conditions_.eval_queries.size())), {},
                measured_.layers[l]);
  for (auto& [name, values] : result.values) {
    const auto* of = measure_as<OfLayer>(name);
    set_all_layers(values, measured_.layers, of != nullptr ? of->over_layers : mean);
    if (of != nullptr && of->over_layers == sum && !conditions_.sampled_layers.empty())
      for (double& total : values.row(values.rows() - 1))
        total *= static_cast<double>(conditions_.layers.size()) / static_cast<double>(measured_.layers.size());
  }
  if (wanted.moments()) add_values<OfMoments>(result.values, wanted, means_[c], measured_, trace_.header());
  if (wanted.by_query) add_by_query(result.by_query, wanted, means_[c], measured_);
  if (!conditions_.sampled_heads.empty()) add_by_head(result.by_head, wanted, means_[c], measured_, trace_.header());
  for (auto& [name, sums] : of_queries_[c]) {
    for (double& sum : sums) sum /= static_cast<double>(measured_.layers.size());
    result.by_query[name] = std::move(sums);
  }
  for (const MetricName& name : wanted.metrics) {
    if (const auto* of = measure_as<OfCell>(name)) result.values[name] = single(of->measure(result.selections));
    if (const auto* of = measure_as<OfSpanInAllLayers>(name))
      if (const Span* span = span_of(name, trace_.header().spans))
        result.values[name] = single(of->measure(result.selections, *span));
  }
  for (const MetricVariant& variant : metrics().get("jaccard_matrix").variants)
    result.matrices[variant.name] = std::get<OfLayerPairs>(variant.measure).measure(result.selections);
  if (wanted.budget > 0 && !result.violation) result.violation = check_budget(result.selections, wanted.budget);
  return result;
}

TraceResult Measurement::take_trace() {
  for (auto& [name, values] : trace_result_.values) set_all_layers(values, measured_.layers, mean);
  return std::move(trace_result_);
}

AllQueriesMeasurement::AllQueriesMeasurement(const Trace& trace, const Conditions& conditions,
                                             std::vector<Wanted> wanted, std::function<void(double, int)> heard)
    : trace_(trace), measured_(trace.header(), conditions), wanted_(std::move(wanted)), heard_(std::move(heard)) {
  for (const Wanted& of_cell : wanted_)
    means_.push_back(
        means_of<OfAllQueries>(of_cell, conditions, trace.header().largest_shape(conditions.layers).query_heads));
}

void AllQueriesMeasurement::compared(const LayerView&, int cell, int, int, std::span<const Comparison> comparisons) {
  comparisons_[cell].assign(comparisons.begin(), comparisons.end());
}

void AllQueriesMeasurement::measured(const LayerView& view, std::span<const int> cells, int first, int count,
                                     const KeptMoments& moments) {
  all_side_by_side(view.backend().threads(), cells.size(), [&](std::size_t i) {
    add_block(means_, view, measured_, cells, i, first, count, moments, comparisons_);
  });
  comparisons_.clear();
}

void AllQueriesMeasurement::layer_done(const LayerView& view, int walk, int walks) {
  if (heard_) heard_(share_done(view, walk, walks), view.layer() + 1);
}

ValuesByMetric AllQueriesMeasurement::take_cell(int cell) const {
  const std::size_t c = static_cast<std::size_t>(cell);
  ValuesByMetric values;
  add_values<OfAllQueries>(values, wanted_[c], means_[c], measured_, trace_.header());
  return values;
}

std::vector<LayerSelection> at_treated_layers(const Conditions& conditions, std::vector<LayerSelection> replayed) {
  if (conditions.sampled_layers.empty()) return replayed;
  std::vector<LayerSelection> selections(conditions.layers.size());
  for (std::size_t i = 0; i < replayed.size(); ++i) {
    const int layer = conditions.sampled_layers[i];
    replayed[i].source = layer;
    selections[static_cast<std::size_t>(layer)] = std::move(replayed[i]);
  }
  return selections;
}

const char* word(Heads heads) { return heads == Heads::kv ? "kv" : heads == Heads::query ? "query" : "layer"; }

Heads heads_of(std::string_view word) {
  return word == "kv" ? Heads::kv : word == "query" ? Heads::query : Heads::layer;
}

}  // namespace kvreplay
