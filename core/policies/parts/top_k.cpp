#include "policies/parts/top_k.h"

#include <algorithm>

#include "policies/parts/ranking.h"
#include "positions.h"

namespace kvreplay {
namespace {

const RegisteredPart registered_top_k{{"top-k", PartKind::selector, "the best tokens between sinks and recent window"}};
const RegisteredPart registered_anywhere{
    {"top-k-anywhere", PartKind::selector, "the best tokens anywhere, and the recent window: overlap is not refilled"}};

}  // namespace

Protection::Clamped Protection::within(int budget) const {
  const int first = std::min(sinks, budget);
  return {first, std::min(recent.of(budget), budget - first)};
}

Selector top_k(Protection protection) {
  return [protection](const Row& row) {
    const auto [sinks, recent] = protection.within(row.budget);
    const int scored = row.budget - sinks - recent;
    Kept kept{position_range(0, sinks), sinks, recent};
    if (scored > 0) {
      const auto candidates = static_cast<std::size_t>(row.prompt - sinks - recent);
      for (const std::int32_t i : largest(row.scores.subspan(static_cast<std::size_t>(sinks), candidates), scored))
        kept.positions.push_back(i + sinks);
    }
    std::ranges::copy(position_range(row.prompt - recent, row.prompt), std::back_inserter(kept.positions));
    return kept;
  };
}

Selector top_k() { return top_k({}); }

Selector top_k_anywhere(Protection protection) {
  return [protection](const Row& row) {
    const auto [sinks, recent] = protection.within(row.budget);
    const std::vector<std::int32_t> by_rule = position_range(row.prompt - recent, row.prompt);
    Kept kept{{}, sinks, recent};
    std::ranges::set_union(largest(row.scores, row.budget - recent), by_rule, std::back_inserter(kept.positions));
    return kept;
  };
}

}  // namespace kvreplay
