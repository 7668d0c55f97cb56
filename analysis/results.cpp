#include "analysis/results.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "analysis/csv.h"
#include "analysis/part.h"
#include "analysis/replaced_file.h"
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

bool shown(const Place& place, Detail detail) {
  if (place.head >= 0) return detail == Detail::head;
  return place.layer < 0 || detail != Detail::summary;
}

std::string place_text(int number) { return number < 0 ? "all" : std::to_string(number); }

/// What all lines of a cell, or of the trace itself, share; their own columns stand between.
class Owner {
 public:
  /// `cell` is null for the trace itself.
  Owner(const PartTrace& trace, const PartCell* cell) : trace_(trace) {
    const auto of_cell = [cell](auto member) { return cell != nullptr ? cell->*member : std::string(); };
    before_ = csv_fields({trace.name, trace.hash, trace.model, cell != nullptr ? cell->role : "trace",
                          of_cell(&PartCell::policy), of_cell(&PartCell::params), of_cell(&PartCell::heads),
                          of_cell(&PartCell::agg), of_cell(&PartCell::budget),
                          cell != nullptr ? std::to_string(cell->budget_tokens) : "",
                          cell != nullptr ? csv_number(cell->kept_tokens) : "", std::to_string(trace.boundary),
                          trace.eval, std::to_string(trace.n_queries)}) +
              ',';
    after_ = ',' + csv_line({"true", trace.synthetic ? "true" : "false", trace.backend,
                             cell != nullptr ? std::to_string(cell->seed) : "", of_cell(&PartCell::id)});
  }

  const PartTrace& trace() const { return trace_; }
  std::string line(const Place& place, const MetricName& name, double value) const {
    return before_ +
           csv_fields(
               {place_text(place.layer < 0 ? place.layer : trace_.layer_index[static_cast<std::size_t>(place.layer)]),
                place_text(place.head), name.metric, name.variant, csv_number(value), unit_of(name)}) +
           after_;
  }

 private:
  const PartTrace& trace_;
  std::string before_, after_;
};

void write_rows(ReplacedFile& file, const Owner& owner, const ValuesByMetric& all, Detail detail) {
  int heads = 0;
  for (const auto& [name, values] : all) heads = std::max(heads, values.columns() - 1);
  const auto write_layer = [&](int layer) {
    for (int column = 0; column <= heads; ++column) {
      const Place place{layer, column < heads ? column : -1};
      // Head h of one layer is another head than head h of the next: means over layers are those of all heads.
      if (!shown(place, detail) || (layer < 0 && place.head >= 0)) continue;
      for (const auto& [name, values] : all) {
        const int own_heads = values.columns() - 1;
        if ((layer >= 0 && values.rows() == 1) || place.head >= own_heads) continue;
        file.write(owner.line(
            place, name, values(layer >= 0 ? layer : values.rows() - 1, place.head >= 0 ? place.head : own_heads)));
      }
    }
  };
  for (const int layer : owner.trace().treated) write_layer(layer);
  write_layer(-1);
}

std::string seconds_line(const Part& part, const PartCell* cell, std::size_t layer, const MetricName& name,
                         double value) {
  const auto of_cell = [cell](auto member) { return cell != nullptr ? cell->*member : std::string(); };
  return csv_line({part.trace.name, of_cell(&PartCell::policy), of_cell(&PartCell::params), of_cell(&PartCell::budget),
                   std::to_string(part.trace.layer_index[static_cast<std::size_t>(part.trace.treated[layer])]),
                   name.metric, name.variant, csv_number(value), "s", of_cell(&PartCell::id)});
}

void write_seconds(ReplacedFile& file, const Part& part) {
  std::vector<std::pair<MetricName, OfSeconds>> kinds;
  for (const std::string& metric : metrics().names())
    for (const MetricVariant& variant : metrics().get(metric).variants)
      if (const auto* of = std::get_if<OfSeconds>(&variant.measure)) kinds.push_back({{metric, variant.name}, *of});
  for (std::size_t l = 0; l < part.trace.observable_seconds.size(); ++l)
    file.write(seconds_line(part, nullptr, l, {"observable_seconds", ""}, part.trace.observable_seconds[l]));
  for (const PartCell& cell : part.cells)
    for (std::size_t l = 0; l < cell.seconds.size(); ++l)
      for (const auto& [name, of] : kinds) file.write(seconds_line(part, &cell, l, name, of.measure(cell.seconds[l])));
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

void assemble(const std::filesystem::path& output, Detail detail) {
  const std::vector<std::filesystem::path> paths = parts_of(output);
  ReplacedFile results(output / "results.csv"), seconds(output / "seconds.csv");
  results.write(csv_line({std::begin(columns), std::end(columns)}));
  seconds.write("trace,policy,params,budget,layer,metric,variant,value,unit,cell\n");
  for (const std::filesystem::path& path : paths) {
    Part part = read_part(path);
    std::ranges::sort(part.cells, {}, [](const PartCell& cell) {
      return std::tie(cell.policy, cell.params, cell.budget_tokens, cell.budget, cell.id);
    });
    write_rows(results, {part.trace, nullptr}, part.trace.values, detail);
    for (const PartCell& cell : part.cells) write_rows(results, {part.trace, &cell}, cell.values, detail);
    write_seconds(seconds, part);
  }
  results.finish();
  seconds.finish();
  write_selections(output / "selections.h5", paths);
}

}  // namespace kvreplay
