#include "policies/scores/attention_scores.h"

#include <algorithm>

#include "policies/plan_part.h"

namespace kvreplay {
namespace {

const RegisteredFixedPart registered_cumulative{PartKind::score, "cumulative",
                                                "accumulated attention of all queries so far",
                                                [](Plan& plan) { plan.score = cumulative_score(); }};
const RegisteredFixedPart registered_observed{
    PartKind::score, "observed",
    "accumulated attention of all queries so far, divided by the number of queries that see the token",
    [](Plan& plan) { plan.score = observed_score(); }};
const RegisteredFixedPart registered_newest{PartKind::score, "newest", "attention of the last query",
                                            [](Plan& plan) { plan.score = newest_score(); }};
const RegisteredFixedPart registered_eval{PartKind::score, "eval",
                                          "attention of the eval queries (oracle: unknown to any real policy)",
                                          [](Plan& plan) { plan.score = eval_score(); }};

}  // namespace

Scorer cumulative_score() {
  const auto score = [](const LayerView& view, const Scoring& how) {
    return how.grouping(view.cumulative_attention(), view.group());
  };
  return {.score = score,
          .needs = all_queries(),
          .accumulates = true,
          .online = OnlineScore::sum,
          .queries = [](const LayerView& view, const Scoring&) { return view.residents().seen; },
          .name = "cumulative"};
}

Scorer observed_score() {
  const auto score = [](const LayerView& view, const Scoring& how) {
    Matrix scores = how.grouping(view.cumulative_attention(), view.group());
    const int seen = view.residents().seen;
    for (int row = 0; row < scores.rows(); ++row) {
      const ResidentPositions positions = view.positions(row);
      for (int i = 0; i < scores.columns(); ++i) {
        const int position = positions[i].number;
        scores(row, i) /= std::min(seen, view.tensors().end_of_queries(position)) - position;
      }
    }
    return scores;
  };
  return {.score = score, .needs = all_queries(), .accumulates = true, .name = "observed"};
}

Scorer newest_score() {
  const auto score = [](const LayerView& view, const Scoring& how) {
    return how.grouping(view.window_attention(1, how.window_end), view.group());
  };
  return {
      .score = score, .needs = last_queries(1), .online = OnlineScore::newest, .places_window = true, .name = "newest"};
}

Scorer eval_score() {
  const auto score = [](const LayerView& view, const Scoring& how) {
    return how.grouping(view.eval_attention(), view.group());
  };
  return {
      .score = score,
      .needs = future_queries(),
      .queries = [](const LayerView& view, const Scoring&) { return static_cast<double>(view.eval_queries().size()); },
      .name = "eval"};
}

}  // namespace kvreplay
