#include "analysis/stored_cell.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <variant>

#include "analysis/format_1.h"
#include "analysis/metrics/metric.h"
#include "analysis/trace_cells.h"
#include "error.h"
#include "float_types.h"

namespace kvreplay {
namespace {

/// As the cell's results were computed by it.
ConfiguredPolicy policy_of(const std::string& where, const CellRecord& cell) {
  ConfiguredPolicy policy = ConfiguredPolicy::parse(cell.label, cell.seed);
  if (policy.params() != cell.params || policy.source_hash() != cell.source)
    throw Error{Refusal::input, where, "policy " + cell.label + " has changed since the run",
                cell.params + (cell.source.empty() ? "" : ", source " + cell.source),
                policy.params() + (policy.source_hash().empty() ? "" : ", source " + policy.source_hash())};
  return policy;
}

Cell cell_of(const std::filesystem::path& cells_path, const TraceCells& of_trace, const std::string& id) {
  const CellRecord* const record = of_trace.find(id);
  if (record == nullptr)
    throw Error{Refusal::input, cells_path.string(), "unknown cell", "the id of a cell of the run", id};
  return {.policy = policy_of(cells_path.string(), *record),
          .budget = record->budget_tokens,
          .of_seen = Budget::parse(record->budget).of_seen(),
          .known = read_selections(cells_path, id, of_trace.trace)};
}

Conditions conditions_of(const Trace& trace, const TraceRecord& of) {
  Conditions conditions{of.boundary, eval_queries(trace, of.eval), of.samples_layers() ? of.all_layers : of.treated};
  if (of.samples_layers())
    for (const int layer : of.treated)
      conditions.sampled_layers.push_back(
          static_cast<int>(std::ranges::lower_bound(of.all_layers, layer) - of.all_layers.begin()));
  return conditions;
}

double kv_bytes(const LayerFacts& facts) {
  return std::get<OfLayer>(find_variant({"kv_bytes", ""})->measure).measure(facts).layer;
}

}  // namespace

StoredCell::StoredCell(const std::filesystem::path& folder, const std::string& name, const std::string& id,
                       std::shared_ptr<const Trace> trace)
    : trace_(std::move(trace)), backend_(make_backend("cpu", 0, {})) {
  refuse_format_1(folder);
  const std::filesystem::path path = folder / "cells" / (name + ".h5");
  where_ = path.string();
  const TraceCells of_trace = read_trace_cells(path);
  if (of_trace.trace.hash != trace_->hash())
    throw Error{Refusal::input, trace_->path().string(), "not the trace of " + where_, of_trace.trace.hash,
                trace_->hash()};
  conditions_ = conditions_of(*trace_, of_trace.trace);
  cell_ = cell_of(path, of_trace, id);
  cell_.known = at_treated_layers(conditions_, std::move(cell_.known));
}

StoredCellLayer StoredCell::layer(int stored_layer) const {
  const std::vector<int>& treated = conditions_.layers;
  const auto place = std::ranges::find(treated, stored_layer);
  if (place == treated.end() || cell_.known[static_cast<std::size_t>(place - treated.begin())].set.rows() == 0)
    throw Error{Refusal::usage, where_, "layer", fmt::format("a treated layer: {}", fmt::join(treated, ", ")),
                std::to_string(stored_layer)};
  StoredCellLayer found;
  const auto heard = [&](const LayerView& view, const LayerSelection& selection, const StoredLayer* changed,
                         bool moves) {
    const LayerTensors& tensors = changed != nullptr ? changed->tensors : view.tensors();
    found.heads = selection.set.heads();
    found.keys = moves ? keys_at_slots(view, selection) : widened(tensors.k);
    found.key_heads = moves && found.heads == Heads::query ? view.query_heads() : view.kv_heads();
    found.values = widened(tensors.v);
    for (int row = 0; row < selection.set.rows(); ++row) {
      std::vector<std::int32_t>& kept = found.positions.emplace_back(selection.in_slot_order(row));
      std::vector<std::int32_t>& stands = found.stands_at.emplace_back(kept);
      if (moves) std::iota(stands.begin(), stands.end(), view.prompt() - static_cast<std::int32_t>(kept.size()));
    }
    found.bytes = kv_bytes({view, selection, changed});
  };
  apply_store(*backend_, *trace_, conditions_, cell_, static_cast<int>(place - treated.begin()), heard);
  return found;
}

}  // namespace kvreplay
