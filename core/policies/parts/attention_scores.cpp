#include "policies/parts/attention_scores.h"

#include "policies/plan_part.h"

namespace kvreplay {
namespace {

const RegisteredFixedPart registered_cumulative{PartKind::score, "cumulative", "attention of all queries so far",
                                                [](Plan& plan) { plan.score = cumulative_score(); }};
const RegisteredFixedPart registered_eval{PartKind::score, "eval",
                                          "attention of the eval queries themselves, which no policy can know",
                                          [](Plan& plan) { plan.score = eval_score(); }};

}  // namespace

Scorer cumulative_score() {
  const auto score = [](const LayerView& view, const Scoring& how) {
    return how.grouping(view.cumulative_attention(), view.group());
  };
  return {.score = score, .needs = all_queries(), .accumulates = true, .name = "cumulative"};
}

Scorer eval_score() {
  const auto score = [](const LayerView& view, const Scoring& how) {
    return how.grouping(view.eval_attention(), view.group());
  };
  return {.score = score, .needs = future_queries(), .name = "eval"};
}

}  // namespace kvreplay
