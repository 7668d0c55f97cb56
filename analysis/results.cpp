#include "analysis/results.h"

#include <fmt/format.h>

#include <algorithm>
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

/// Where a value stands: layer and head, -1 for all of them, which sorts behind the numbers.
struct Place {
  int layer;
  int head;
};

std::string place_text(int number) { return number < 0 ? "all" : std::to_string(number); }

/// What all lines of a cell, or of the trace itself, share; their own columns stand between.
class Owner {
 public:
  /// `cell` is null for the trace itself.
  Owner(const TraceRecord& trace, const CellRecord* cell) : trace_(trace) {
    const auto of_cell = [cell](auto member) { return cell != nullptr ? cell->*member : std::string(); };
    before_ = csv_fields({trace.name, trace.hash, trace.model, cell != nullptr ? cell->role : "trace",
                          of_cell(&CellRecord::policy), of_cell(&CellRecord::params), of_cell(&CellRecord::heads),
                          of_cell(&CellRecord::agg), of_cell(&CellRecord::budget),
                          cell != nullptr ? std::to_string(cell->budget_tokens) : "",
                          cell != nullptr ? csv_number(cell->kept_tokens) : "", std::to_string(trace.boundary),
                          trace.eval, std::to_string(trace.n_queries)}) +
              ',';
    after_ = ',' + csv_line({"true", trace.synthetic ? "true" : "false", trace.backend,
                             cell != nullptr ? std::to_string(cell->seed) : "", of_cell(&CellRecord::id)});
  }

  void write(ReplacedFile& file, const ValuesByMetric& all, Detail detail) const {
    std::vector<Column> metrics;
    int heads = 0;  // of the layers
    for (const auto& [name, values] : all) {
      metrics.push_back(
          {csv_fields({name.metric, name.variant}) + ',', ',' + csv_field(unit_of(name)) + after_, values});
      if (values.rows() > 1) heads = std::max(heads, values.columns() - 1);
    }
    for (const int layer : trace_.treated) {
      if (detail == Detail::head)
        for (int head = 0; head < heads; ++head) write_place(file, metrics, {layer, head});
      if (detail != Detail::summary) write_place(file, metrics, {layer, -1});
    }
    // Head h of one layer is another head than head h of the next: means over layers are those of all heads.
    write_place(file, metrics, {-1, -1});
  }

 private:
  /// A metric, and what stands before and behind each of its values.
  struct Column {
    std::string before, behind;
    const Values& values;
  };

  void write_place(ReplacedFile& file, const std::vector<Column>& metrics, const Place& place) const {
    const int layer = place.layer < 0 ? place.layer : trace_.layer_index[static_cast<std::size_t>(place.layer)];
    const std::string place_before = before_ + place_text(layer) + ',' + place_text(place.head) + ',';
    std::string lines;
    for (const auto& [before, behind, values] : metrics) {
      const int own_heads = values.columns() - 1;
      if ((place.layer >= 0 && values.rows() == 1) || place.head >= own_heads) continue;
      const double value =
          values(place.layer >= 0 ? place.layer : values.rows() - 1, place.head >= 0 ? place.head : own_heads);
      lines.append(place_before).append(before).append(csv_number(value)).append(behind);
    }
    file.write(lines);
  }

  const TraceRecord& trace_;
  std::string before_, after_;
};

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

Results::Results(const std::filesystem::path& output, Detail detail)
    : detail_(detail), rows_(output / "results.csv"), seconds_(output / "seconds.csv") {
  rows_.write(csv_line({std::begin(columns), std::end(columns)}));
  seconds_.write("trace,policy,params,budget,layer,metric,variant,value,unit,cell\n");
}

void Results::add(const TraceCells& all) {
  std::vector<const CellRecord*> cells;
  for (const CellRecord& cell : all.cells) cells.push_back(&cell);
  std::ranges::sort(cells, {}, [](const CellRecord* cell) {
    return std::tie(cell->policy, cell->params, cell->budget_tokens, cell->budget, cell->id);
  });
  Owner(all.trace, nullptr).write(rows_, all.trace.values, detail_);
  for (const CellRecord* cell : cells) Owner(all.trace, cell).write(rows_, cell->values, detail_);
  write_seconds(seconds_, all.trace, cells);
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
  Results results(output, detail);
  for (const std::filesystem::path& file : files) results.add(read_trace_cells(file));
  results.complete();
  results.finish();
}

}  // namespace kvreplay
