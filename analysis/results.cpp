#include "analysis/results.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>

#include "analysis/csv.h"
#include "analysis/results_folder.h"

namespace kvreplay {
namespace {

const std::string columns[] = {
    "trace",         "trace_hash",  "model",     "role",      "policy",    "params", "heads", "agg",    "budget",
    "budget_tokens", "kept_tokens", "boundary",  "eval",      "n_queries", "layer",  "head",  "metric", "variant",
    "value",         "unit",        "open_loop", "synthetic", "backend",   "seed",   "cell"};

const std::string columns_of_samples[] = {"sample", "half_width"};

std::string place_text(int number) { return number < 0 ? "all" : std::to_string(number); }

/// The columns that all rows of a cell share, those up to n_queries and those from open_loop; of the trace itself where
/// `cell` is null.
std::vector<std::string> before_place(const TraceRecord& trace, const CellRecord* cell) {
  const CellRecord of_trace{.role = "trace"};
  const CellRecord& of = cell != nullptr ? *cell : of_trace;
  return {trace.name,
          trace.hash,
          trace.model,
          of.role,
          of.policy,
          of.params,
          of.heads,
          of.agg,
          of.budget,
          cell != nullptr ? std::to_string(of.budget_tokens) : "",
          cell != nullptr ? csv_number(of.kept_tokens) : "",
          std::to_string(trace.boundary),
          trace.eval,
          std::to_string(trace.n_queries)};
}

std::vector<std::string> behind_value(const TraceRecord& trace, const CellRecord* cell) {
  return {"true", trace.synthetic ? "true" : "false", trace.backend, cell != nullptr ? std::to_string(cell->seed) : "",
          cell != nullptr ? cell->id : ""};
}

/// Calls `visit(layer, head, metric, value)` for each row of a cell or trace in its order; -1: all layers, all heads.
/// `metric` counts those of `all`.
template <class Visit>
void visit_values(const TraceRecord& trace, const ValuesByMetric& all, Detail detail, Visit visit) {
  int heads = 0;  // of the layers
  for (const auto& [name, values] : all)
    if (values.rows() > 1) heads = std::max(heads, values.columns() - 1);
  const auto visit_place = [&](int layer, int head) {
    std::size_t metric = 0;
    for (const auto& [name, values] : all) {
      const int own_heads = values.columns() - 1;
      if ((layer < 0 || values.rows() > 1) && head < own_heads)
        visit(layer < 0 ? layer : trace.layer_index[static_cast<std::size_t>(layer)], head, metric,
              values(layer < 0 ? values.rows() - 1 : layer, head < 0 ? own_heads : head));
      ++metric;
    }
  };
  for (const int layer : trace.treated) {
    if (detail == Detail::head)
      for (int head = 0; head < heads; ++head) visit_place(layer, head);
    if (detail != Detail::summary) visit_place(layer, -1);
  }
  // Head h of one layer is another head than head h of the next: means over layers are those of all heads.
  visit_place(-1, -1);
}

/// Of a value over all layers and heads; NaN: it is not an estimate.
double half_width(const CellRecord* cell, const MetricName& name, int layer) {
  return cell != nullptr && layer < 0 ? cell->half_width(name) : std::numeric_limits<double>::quiet_NaN();
}

void write_rows(ReplacedFile& file, const TraceRecord& trace, const CellRecord* cell, Detail detail, bool sampled) {
  const ValuesByMetric& all = cell != nullptr ? cell->values : trace.values;
  const std::string before = csv_fields(before_place(trace, cell)) + ',';
  const std::string behind = ',' + csv_fields(behind_value(trace, cell));
  const std::string of_sample = sampled ? ',' + csv_field(trace.sample_text()) + ',' : "";
  std::vector<MetricName> names;
  std::vector<std::pair<std::string, std::string>> around;  // each value of a metric
  for (const auto& [name, values] : all) {
    names.push_back(name);
    around.emplace_back(csv_fields({name.metric, name.variant}) + ',',
                        ',' + csv_field(unit_of(name)) + behind + of_sample);
  }
  std::string place, lines;
  std::optional<std::pair<int, int>> known;
  visit_values(trace, all, detail, [&](int layer, int head, std::size_t metric, double value) {
    if (known != std::pair(layer, head)) {
      known = {layer, head};
      place = before + place_text(layer) + ',' + place_text(head) + ',';
    }
    lines.append(place).append(around[metric].first).append(csv_number(value)).append(around[metric].second);
    if (sampled) lines.append(csv_number(half_width(cell, names[metric], layer)));
    lines.push_back('\n');
  });
  file.write(lines);
}

/// The cells in the order of results.csv.
std::vector<const CellRecord*> sorted(std::span<const CellRecord> all) {
  std::vector<const CellRecord*> cells;
  for (const CellRecord& cell : all) cells.push_back(&cell);
  std::ranges::sort(cells, {}, [](const CellRecord* cell) {
    return std::tie(cell->policy, cell->params, cell->budget_tokens, cell->budget, cell->id);
  });
  return cells;
}

std::string seconds_line(const TraceRecord& trace, const CellRecord* cell, std::size_t layer, const MetricName& name,
                         double value) {
  const auto of_cell = [cell](auto member) { return cell != nullptr ? cell->*member : std::string(); };
  return csv_line({trace.name, of_cell(&CellRecord::policy), of_cell(&CellRecord::params), of_cell(&CellRecord::budget),
                   std::to_string(trace.layer_index[static_cast<std::size_t>(trace.treated[layer])]), name.metric,
                   name.variant, csv_number(value), "s", of_cell(&CellRecord::id)});
}

void write_seconds(ReplacedFile& file, const TraceRecord& trace, const std::vector<const CellRecord*>& cells) {
  std::vector<std::pair<MetricName, OfSeconds>> kinds;
  for (const std::string& metric : metrics().names())
    for (const MetricVariant& variant : metrics().get(metric).variants)
      if (const auto* of = std::get_if<OfSeconds>(&variant.measure)) kinds.push_back({{metric, variant.name}, *of});
  for (std::size_t l = 0; l < trace.observable_seconds.size(); ++l)
    file.write(seconds_line(trace, nullptr, l, {"observable_seconds", ""}, trace.observable_seconds[l]));
  for (const CellRecord* cell : cells)
    for (std::size_t l = 0; l < cell->seconds.size(); ++l)
      for (const auto& [name, of] : kinds) file.write(seconds_line(trace, cell, l, name, of.measure(cell->seconds[l])));
}

}  // namespace

Detail parse_detail(std::string_view text) {
  if (text == "summary") return Detail::summary;
  if (text == "layer") return Detail::layer;
  if (text == "head") return Detail::head;
  const std::vector<std::string> known{"summary", "layer", "head"};
  throw Error{Refusal::usage, "--detail", "unknown detail", nearest(text, known), std::string(text)};
}

const char* word(Detail detail) {
  return detail == Detail::summary ? "summary" : detail == Detail::layer ? "layer" : "head";
}

std::span<const std::string> result_columns() { return columns; }

Results::Results(const std::filesystem::path& output, Detail detail, bool sampled)
    : detail_(detail), sampled_(sampled), rows_(output / "results.csv"), seconds_(output / "seconds.csv") {
  std::vector<std::string> header(std::begin(columns), std::end(columns));
  if (sampled) header.insert(header.end(), std::begin(columns_of_samples), std::end(columns_of_samples));
  rows_.write(csv_line(header));
  seconds_.write("trace,policy,params,budget,layer,metric,variant,value,unit,cell\n");
}

void Results::add(const TraceCells& all) {
  const std::vector<const CellRecord*> cells = sorted(all.cells);
  write_rows(rows_, all.trace, nullptr, detail_, sampled_);
  for (const CellRecord* cell : cells) write_rows(rows_, all.trace, cell, detail_, sampled_);
  write_seconds(seconds_, all.trace, cells);
}

void ResultColumns::add(const TraceRecord& trace, std::span<const CellRecord> cells, Detail detail) {
  const auto add_owner = [&](const CellRecord* cell) {
    const ValuesByMetric& all = cell != nullptr ? cell->values : trace.values;
    std::vector<std::int32_t> numbers;  // of the metrics of `all`
    std::vector<MetricName> names;
    for (const auto& [name, values] : all) {
      names.push_back(name);
      const auto found = std::ranges::find(metrics, name);
      numbers.push_back(static_cast<std::int32_t>(found - metrics.begin()));
      if (found == metrics.end()) metrics.push_back(name);
    }
    visit_values(trace, all, detail, [&](int at_layer, int at_head, std::size_t of, double number) {
      owner.push_back(static_cast<std::int32_t>(owners.size()));
      layer.push_back(at_layer);
      head.push_back(at_head);
      metric.push_back(numbers[of]);
      value.push_back(number);
      half_width.push_back(kvreplay::half_width(cell, names[of], at_layer));
    });
    owners.push_back(before_place(trace, cell));
    std::ranges::move(behind_value(trace, cell), std::back_inserter(owners.back()));
    owners.back().push_back(trace.sample_text());
  };
  add_owner(nullptr);
  for (const CellRecord* cell : sorted(cells)) add_owner(cell);
}

void Results::complete() {
  rows_.complete();
  seconds_.complete();
}

void Results::finish() {
  rows_.finish();
  seconds_.finish();
}

void assemble(const std::filesystem::path& output, Detail detail) {
  const std::vector<std::filesystem::path> files = cell_files_of(output);
  const bool sampled = std::ranges::any_of(files, is_sampled);
  Results results(output, detail, sampled);
  for (const std::filesystem::path& file : files) results.add(read_trace_cells(file));
  results.complete();
  results.finish();
}

}  // namespace kvreplay
