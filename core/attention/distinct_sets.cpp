#include "attention/distinct_sets.h"

#include <algorithm>
#include <cassert>

namespace kvreplay {

DistinctSets::DistinctSets(std::span<const KeptSets> kept, int boundary)
    : everything_(Heads::layer, 1, boundary), sets_{{&everything_, 1}} {
  everything_.keep(0, 0, boundary);
  for (const KeptSets asked : kept) {
    assert(std::ranges::all_of(asked, [&](const KeptSet& set) { return set.tokens() >= boundary; }));
    const bool constant = std::ranges::all_of(asked, [&](const KeptSet& set) { return set == asked.front(); });
    const KeptSets wanted = constant ? asked.first(1) : asked;
    const auto same = std::ranges::find_if(sets_, [&](KeptSets some) { return std::ranges::equal(some, wanted); });
    number_of_.push_back(static_cast<int>(same - sets_.begin()));
    if (same == sets_.end()) sets_.push_back(wanted);
  }
}

}  // namespace kvreplay
