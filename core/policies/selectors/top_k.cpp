#include "policies/selectors/top_k.h"

#include <algorithm>

#include "policies/arithmetic/ranking.h"
#include "policies/plan_part.h"
#include "positions.h"

namespace kvreplay {
namespace {

Kept best_between(const Row& row) {
  const auto candidates = static_cast<std::size_t>(row.tokens - row.sinks - row.recent);
  const std::span<const double> of_candidates = row.scores.subspan(static_cast<std::size_t>(row.sinks), candidates);
  Kept kept{position_range(0, row.sinks), row.sinks, row.recent};
  std::ranges::copy(largest(of_candidates, row.budget - row.sinks - row.recent, row.sinks),
                    std::back_inserter(kept.positions));
  std::ranges::copy(position_range(row.tokens - row.recent, row.tokens), std::back_inserter(kept.positions));
  return kept;
}

Kept best_anywhere(const Row& row) {
  std::vector<std::int32_t> by_rule = position_range(0, row.sinks);
  std::ranges::copy(position_range(row.tokens - row.recent, row.tokens), std::back_inserter(by_rule));
  Kept kept{{}, row.sinks, row.recent};
  std::ranges::set_union(largest(row.scores, row.budget - row.sinks - row.recent), by_rule,
                         std::back_inserter(kept.positions));
  return kept;
}

const RegisteredFixedPart registered_top_k{PartKind::select, "top-k",
                                           "highest-scored tokens between sinks and recent window",
                                           [](Plan& plan) { plan.select = top_k(); }};
const RegisteredFixedPart registered_anywhere{
    PartKind::select, "top-k-anywhere",
    "highest-scored tokens anywhere, and the protected tokens; overlapping slots are not refilled",
    [](Plan& plan) { plan.select = top_k_anywhere(); }};

}  // namespace

Selector top_k() { return {.select = best_between, .takes_best = true}; }
Selector top_k_anywhere() { return {.select = best_anywhere, .fills = false}; }

}  // namespace kvreplay
