// Stores that do not change the numbers of a kept token. The others have their own files.
#include "policies/stores/stores.h"

#include <algorithm>

#include "float_types.h"
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

constexpr Choice<Positions> positions_words[] = {{"original", Positions::original}, {"cache", Positions::cache}};

const RegisteredFixedPart registered_exact{PartKind::store, "exact",
                                           "keys and values are unchanged, at their original positions",
                                           [](Plan& plan) { plan.store = exact(); }};
const RegisteredFixedPart registered_cache{
    PartKind::store, "cache", "kept tokens move to contiguous cache positions, and the query moves with them",
    [](Plan& plan) { plan.store = store_at(Positions::cache); }};

}  // namespace

void add_positions(Parameters& p, Positions& positions) {
  p.add<Positions>("positions", positions, positions_words,
                   "positions of kept tokens: another spelling of store=exact (original) and store=cache (contiguous)");
}

StorePtr exact() {
  static const auto store = std::make_shared<const Store>(Store{.name = "store=exact"});
  return store;
}

StorePtr store_at(Positions positions) {
  static const auto moved = std::make_shared<const Store>(Store{.name = "store=cache", .moves_tokens = true});
  return positions == Positions::cache ? StorePtr(moved) : exact();
}

std::unique_ptr<StoredLayer> exact_copy(const LayerView& view) {
  const LayerTensors& exact = view.tensors();
  auto layer = std::make_unique<StoredLayer>();
  layer->keys = widened(exact.k);
  layer->values = widened(exact.v);
  layer->tensors = exact;
  layer->tensors.k = view_of(layer->keys, exact.k);
  layer->tensors.v = view_of(layer->values, exact.v);
  return layer;
}

std::vector<std::int32_t> held_of_prompt(const LayerView& view, const KeptSet& kept, int kv_head) {
  std::vector<std::int32_t> positions = kept.positions(kept.heads() == Heads::kv ? kv_head : 0);
  positions.erase(std::ranges::lower_bound(positions, view.prompt()), positions.end());
  return positions;
}

}  // namespace kvreplay
