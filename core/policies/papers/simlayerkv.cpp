#include <numeric>
#include <string>

#include "policies/policy.h"

namespace kvreplay {
namespace {

/// [1, n]: mean attention over the last queries and all query heads.
Scorer mean_of_last_rows(int rows) {
  const auto score = [rows](const LayerView& view, const Scoring& how) {
    Matrix scores = how.grouping(view.window_attention(rows, how.window_end), view.group());
    const double queries = static_cast<double>(view.query_heads()) * view.queries_before(rows, how.window_end);
    for (double& mean : scores.values()) mean /= queries;
    return scores;
  };
  return {.score = score,
          .needs = last_queries(rows),
          .places_window = true,
          .name = "mean-of-last-rows(" + std::to_string(rows) + ")"};
}

/// Protected tokens in layers where they receive more than `threshold` of the attention; all tokens in other layers.
WithinLayer by_rule_where_lazy(double threshold) {
  return [threshold](const Division& division, const Matrix& scores) {
    const std::span<const double> row = scores.row(0);
    const auto sinks = row.first(static_cast<std::size_t>(division.sinks));
    const auto recent = row.last(static_cast<std::size_t>(division.recent));
    const double mass = std::accumulate(recent.begin(), recent.end(), std::accumulate(sinks.begin(), sinks.end(), 0.0));
    return std::vector<int>{mass > threshold ? division.by_rule() : division.prompt};
  };
}

struct SimLayerKv {
  static constexpr Card card{
      .name = "simlayerkv",
      .summary =
          "Detects lazy layers (attention on sinks and recent tokens) and applies StreamingLLM to them; other layers "
          "keep everything",
      .paper = "Zhang et al. 2024, SimLayerKV, arXiv:2410.13846",
      .score =
          "s[j] = mean over query heads and the last `rows` queries t of softmax_j(q_t k_j); a layer is lazy if the "
          "sum of s over sinks and recent tokens > threshold",
      .family = Family::budget,
  };

  int rows = 1;
  int sinks = 4;
  int recent = 1024;
  double threshold = 0.9;

  void parameters(Parameters& p) {
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens that a lazy layer keeps");
    p.add("recent", recent, IntRange{.up_to = UpTo::prompt}, "recent window: last tokens that a lazy layer keeps");
    {
      const auto read = p.of_part("score");
      p.add("rows", rows, IntRange{.least = 1}, "number of last queries whose attention detects lazy layers");
    }
    const auto read = p.of_part("allocate");
    p.add("threshold", threshold, RealRange{0.0, 1.0},
          "a layer is lazy if its attention on sinks and recent tokens exceeds this share");
    p.preset({"llama-3", "SimLayerKV with Llama 3", {{"threshold", "0.9"}}});
    p.preset({"llama-2", "SimLayerKV with Llama 2", {{"threshold", "0.65"}}});
    p.preset({"mistral", "SimLayerKV with Mistral", {{"threshold", "0.8"}}});
    p.preset({"qwen", "SimLayerKV with Qwen", {{"threshold", "0.85"}}});
  }

  Plan plan() const {
    return {
        .grouping = {.heads = Heads::layer},
        .score = mean_of_last_rows(rows),
        .protect = {.sinks = sinks, .recent = Amount::tokens(recent)},
        .allocate = within_layer(by_rule_where_lazy(threshold)),
        .own_memory = true,
    };
  }
};

const Registered<SimLayerKv> registered;

}  // namespace
}  // namespace kvreplay
