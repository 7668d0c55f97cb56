#include "replay/stored_cells.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "attention/rope.h"
#include "float_types.h"
#include "replay/resident_layers.h"
#include "replay/trace_inputs.h"

namespace kvreplay {

std::vector<float> keys_at_slots(const LayerView& view, const LayerSelection& selection) {
  const TensorView& keys = view.tensors().k;
  const KeptSet& set = selection.set;
  const int heads = set.heads() == Heads::query ? view.query_heads() : keys.heads;
  TensorView shape = keys;
  shape.heads = heads;
  std::vector<float> moved(static_cast<std::size_t>(heads) * static_cast<std::size_t>(keys.tokens) *
                           static_cast<std::size_t>(keys.dim));
  for (int head = 0; head < heads; ++head) {
    for (int token = 0; token < keys.tokens; ++token) {
      const std::span<float> key = row_of(moved, shape, head, token);
      const std::byte* const captured = keys.row(head * keys.heads / heads, token);
      for (std::size_t i = 0; i < key.size(); ++i) key[i] = load(captured, keys.dtype, i);
    }
    const std::vector<std::int32_t> slots =
        selection.in_slot_order(set.row_of(head * (view.query_heads() / heads), view.group()));
    const auto count = static_cast<int>(slots.size());
    for (int slot = 0; slot < count; ++slot) {
      const std::int32_t token = slots[static_cast<std::size_t>(slot)];
      rotate(view.tensors().rope, view.prompt() - count + slot - token, row_of(moved, shape, head, token));
    }
  }
  return moved;
}

namespace {

/// [queries][budgets] the sets of the eval queries, which several metrics read: computed once, on all threads, where
/// those of a budget fit.
std::vector<std::vector<KeptSet>> eval_sets(const LayerReads& reads, const LayerView& view,
                                            std::span<const int> budgets) {
  constexpr std::size_t most_bytes = std::size_t{64} << 20;
  const std::span<const std::int32_t> queries = view.eval_queries();
  const std::size_t set_bytes =
      static_cast<std::size_t>(view.query_heads()) * static_cast<std::size_t>(view.prompt()) / 8;
  if (queries.size() * set_bytes > most_bytes) return {};
  std::vector<std::vector<KeptSet>> sets(queries.size());
  view.on_threads(queries.size(), [&](std::size_t i) { sets[i] = reads.at(queries[i], budgets); });
  return sets;
}

}  // namespace

std::vector<QueryReads> reads_of(const Plan& plan, const LayerView& view, std::span<const int> budgets) {
  std::vector<QueryReads> all(budgets.size());
  std::vector<int> binding;
  for (const int budget : budgets)
    if (budget < view.prompt() || !plan.schedule->has_budget()) binding.push_back(budget);
  if (binding.empty()) return all;
  const auto reads = std::make_shared<const LayerReads>(plan.schedule->reads(view));
  if (!reads->at) return all;
  const auto sets = std::make_shared<const std::vector<std::vector<KeptSet>>>(eval_sets(*reads, view, binding));
  std::size_t next = 0;
  for (std::size_t i = 0; i < budgets.size(); ++i) {
    if (next == binding.size() || budgets[i] != binding[next]) continue;
    all[i] = {[queries = view.eval_queries(), sets, number = next++, reads, budget = budgets[i]](int query) {
                const auto found = std::ranges::lower_bound(queries, query);
                const auto place = static_cast<std::size_t>(found - queries.begin());
                return place < sets->size() && *found == query ? (*sets)[place][number]
                                                               : reads->at(query, {&budget, 1}).front();
              },
              reads->bytes, reads->weights};
  }
  return all;
}

void apply_store(Backend& backend, const Trace& trace, const Conditions& conditions, const Cell& cell, int layer,
                 const StoreApplied& heard) {
  const auto layers = static_cast<int>(conditions.layers.size());
  const int stored = conditions.layers.at(static_cast<std::size_t>(layer));
  const std::vector<LayerPlan> plans = cell.policy.plans(layers);
  const LayerPlan& of_range = *std::ranges::find_if(plans, [&](const LayerPlan& one) { return layer < one.end(); });
  const Plan& plan = of_range.plan;
  // An archived layer is put together in place of the one before it.
  std::optional<PairedLayer> paired;
  if (plan.store->pairs_layers()) {
    const int partner = of_range.partner_of(layer);
    paired.emplace(trace, partner, conditions.layers.at(static_cast<std::size_t>(partner)));
  }
  const LayerTensors tensors = trace.layer(stored);
  HeldLayer held(backend, tensors);
  held.hold(plan.store->needs.all_queries);
  const TensorView projection = plan.store->needs.projection ? output_projection(trace, stored) : TensorView{};
  const LayerView view(
      backend, tensors,
      {layer, layers, stored, conditions.boundary, marked_question(trace, conditions.boundary), projection},
      conditions.eval_queries);
  LayerSelection selection = cell.known.at(static_cast<std::size_t>(layer));
  selection.reads = reads_of(plan, view, {&cell.budget, 1}).front();
  std::unique_ptr<StoredLayer> changed;
  if (plan.store->evolve && selection.changes_with_time())
    changed = plan.store->evolve(view, selection)->before(view.prompt());
  else if (plan.store->changes_tokens())
    changed = plan.store->apply(view, selection.set,
                                paired ? paired->partner : Partner{view.layer(), view.tensors(), of_range.first});
  heard(view, selection, changed.get(), plan.store->moves_tokens);
  trace.require_unchanged();
  trace.release(stored);
}

}  // namespace kvreplay
