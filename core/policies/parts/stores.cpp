// Stores by name that change no number of a kept token; those that do have files of their own.
#include "policies/parts/stores.h"

#include "policies/plan_part.h"

namespace kvreplay {
namespace {

constexpr Choice<Positions> positions_words[] = {{"original", Positions::original}, {"cache", Positions::cache}};

struct ExactPart {
  static constexpr PartKind kind = PartKind::store;
  static constexpr const char* name = "exact";
  static constexpr const char* summary = "kept tokens stay as they are, where they were";

  void parameters(Parameters&) {}
  void fill(Plan& plan) const { plan.store = Exact{}; }
};

struct CachePart {
  static constexpr PartKind kind = PartKind::store;
  static constexpr const char* name = "cache";
  static constexpr const char* summary = "kept tokens move to their slots in the cache, and so does the query";

  void parameters(Parameters&) {}
  void fill(Plan& plan) const { plan.store = CachePositions{}; }
};

const RegisteredPart<ExactPart> registered_exact;
const RegisteredPart<CachePart> registered_cache;

}  // namespace

void add_positions(Parameters& p, Positions& positions) {
  p.add<Positions>("positions", positions, positions_words,
                   "kept tokens stay where they were, or move to their slots 0, 1, 2 ...");
}

Store store_at(Positions positions) { return positions == Positions::cache ? Store{CachePositions{}} : Store{Exact{}}; }

}  // namespace kvreplay
