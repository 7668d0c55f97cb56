// One set for the layer, of policies that score for KV heads alone: their rows are added up, as the sum over all query
// heads is where a policy scores for these.
#include <string>

#include "policies/grouping.h"
#include "policies/plan_part.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

Scorer summed(Scorer of_rows, Grouping rows) {
  Scorer scorer = of_rows;
  scorer.score = [score = std::move(of_rows.score), rows](const LayerView& view, const Scoring& how) {
    Scoring by_rows = how;
    by_rows.grouping = rows;
    return sum_over_rows(score(view, by_rows));
  };
  if (!scorer.name.empty()) scorer.name = "sum over rows of " + scorer.name;
  return scorer;
}

void fill(Plan& plan) {
  if (plan.grouping.heads == Heads::layer) return;
  if (plan.score) plan.score = summed(std::move(plan.score), plan.grouping);
  plan.grouping.heads = Heads::layer;
}

const RegisteredFixedPart registered{PartKind::heads, "layer",
                                     "one kept set per layer, by the scores summed over its heads", fill};

}  // namespace
}  // namespace kvreplay
