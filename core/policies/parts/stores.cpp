// Stores by name that change no number of a kept token; those that do have files of their own.
#include "policies/parts/stores.h"

#include "policies/plan_part.h"

namespace kvreplay {
namespace {

constexpr Choice<Positions> positions_words[] = {{"original", Positions::original}, {"cache", Positions::cache}};

const RegisteredFixedPart registered_exact{PartKind::store, "exact", "kept tokens stay as they are, where they were",
                                           [](Plan& plan) { plan.store = Exact{}; }};
const RegisteredFixedPart registered_cache{PartKind::store, "cache",
                                           "kept tokens move to their slots in the cache, and so does the query",
                                           [](Plan& plan) { plan.store = CachePositions{}; }};

}  // namespace

void add_positions(Parameters& p, Positions& positions) {
  p.add<Positions>("positions", positions, positions_words,
                   "kept tokens stay where they were, or move to their slots 0, 1, 2 ...");
}

Store store_at(Positions positions) { return positions == Positions::cache ? Store{CachePositions{}} : Store{Exact{}}; }

}  // namespace kvreplay
