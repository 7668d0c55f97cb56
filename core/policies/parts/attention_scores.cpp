#include "policies/parts/attention_scores.h"

#include "policies/plan_part.h"

namespace kvreplay {
namespace {

struct Cumulative {
  static constexpr PartKind kind = PartKind::score;
  static constexpr const char* name = "cumulative";
  static constexpr const char* summary = "attention of all queries so far";

  void parameters(Parameters&) {}
  void fill(Plan& plan) const { plan.score = cumulative_score(); }
};

struct Eval {
  static constexpr PartKind kind = PartKind::score;
  static constexpr const char* name = "eval";
  static constexpr const char* summary = "attention of the eval queries themselves, which no policy can know";

  void parameters(Parameters&) {}
  void fill(Plan& plan) const { plan.score = eval_score(); }
};

const RegisteredPart<Cumulative> registered_cumulative;
const RegisteredPart<Eval> registered_eval;

}  // namespace

Scorer cumulative_score() {
  const auto score = [](const LayerView& view, const Scoring& how) {
    return how.grouping(view.cumulative_attention(), view.group());
  };
  return {.score = score, .needs = all_queries(), .accumulates = true};
}

Scorer eval_score() {
  const auto score = [](const LayerView& view, const Scoring& how) {
    return how.grouping(view.eval_attention(), view.group());
  };
  return {.score = score, .needs = future_queries()};
}

}  // namespace kvreplay
