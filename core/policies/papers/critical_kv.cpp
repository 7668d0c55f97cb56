#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "observables/projected_norms.h"
#include "policies/arithmetic/pooling.h"
#include "policies/arithmetic/ranking.h"
#include "policies/policy.h"
#include "policies/text/configured.h"
#include "policies/text/inner_policy.h"

namespace kvreplay {
namespace {

enum class Projection { trace, none };

constexpr Choice<Projection> projection_words[] = {{"trace", Projection::trace}, {"none", Projection::none}};

/// [Hq, P]: L1 norms of W_o v, or of v.
Matrix value_norms(const LayerView& view, Projection projection) {
  if (projection == Projection::trace)
    return view.remember("projected_value_norms", {}, [&] {
      return projected_norms(view.tensors().v, view.place().projection, view.group(), view.prompt(),
                             view.backend().threads());
    });
  const Matrix& of_heads = view.value_norms(1.0);
  Matrix norms(view.query_heads(), of_heads.columns());
  for (int head = 0; head < norms.rows(); ++head)
    std::ranges::copy(of_heads.row(head / view.group()), norms.row(head).begin());
  return norms;
}

struct CriticalKv {
  static constexpr Card card{
      .name = "critical-kv",
      .summary =
          "Two stages: half of the budget by the scores of a base policy, the rest by these scores times the L1 norm "
          "of the projected values",
      .paper = "Feng et al. 2025, CriticalKV, arXiv:2502.03805",
      .score =
          "first the floor(first B) highest s of the base, protected tokens included; then the highest (s + 1e-4) |W_o "
          "v_j|_1, group mean; s is a mean over queries where the base has a sum",
      .family = Family::attention,
  };

  InnerPolicy base{"expected-attention:vnorm=false"};
  Projection projection = Projection::trace;
  double first = 0.5;
  std::uint64_t seed = 0;

  void parameters(Parameters& p) {
    const auto set = [this](std::string_view text) {
      // Without its own factor |v|: the value norm would count twice.
      if (text == "expected-attention") text = "expected-attention:vnorm=false";
      return base.set(text, seed);
    };
    p.add("base", base.text, "(POLICY)", set, "policy whose scores and protected tokens are used");
    p.add<Projection>("wo", projection, projection_words,
                      "value norms after the output projection W_o of the trace, or before it");
    p.add("first", first, RealRange{}, "share of the budget for the highest-scored tokens of the base");
  }

  void set_seed(std::uint64_t given) { seed = given; }

  std::vector<Source> sources() const { return base.sources(); }

  /// Tokens selected in the first stage get infinite scores.
  Scorer two_stages(const Plan& of_base) const {
    const auto score = [projection = projection, first = first, scored = of_base.score](const LayerView& view,
                                                                                        const Scoring& how) {
      constexpr double epsilon = 1e-4;
      const Matrix base_scores = scored.score(view, how);
      const Grouping group_mean{how.grouping.heads, Aggregate::mean};
      Matrix scores = group_mean(value_norms(view, projection), view.group());
      const Candidates candidates = candidates_of(view.tokens(), how);
      const int best = static_cast<int>(first * how.budget) - how.sinks - how.recent;
      const double queries = scored.queries ? scored.queries(view, how) : 1.0;
      for (int row = 0; row < scores.rows(); ++row) {
        const std::span<const double> base_row = base_scores.row(row);
        const std::span<double> of_row = scores.row(row);
        for (std::size_t j = 0; j < of_row.size(); ++j) of_row[j] *= base_row[j] / queries + epsilon;
        for (const std::int32_t j : largest(candidates.of(base_row), best, candidates.first))
          of_row[static_cast<std::size_t>(j)] = std::numeric_limits<double>::infinity();
      }
      return scores;
    };
    Scorer both{.score = score,
                .needs = of_base.score.needs,
                .reads_recent = true,
                .reads_budget = true,
                .reads_sinks = true,
                .places_window = of_base.score.places_window,
                .of_prompt = true};
    both.needs.projection = projection == Projection::trace;
    if (!of_base.score.name.empty())
      both.name = fmt::format("critical-kv({},wo={},first={})", of_base.score.name,
                              projection == Projection::trace ? "trace" : "none", first);
    return both;
  }

  Plan plan() const {
    constexpr int some_layers = 2;
    const std::vector<LayerPlan> plans = base->plans(some_layers);
    Plan plan = plans.front().plan;
    const bool scores_tokens = plan.score && plan.select.takes_best &&
                               plan.schedule->decided() == Decision::after_prefill && plan.allocate->is_uniform &&
                               has_budget(plan) && plans.size() == 1;
    if (!scores_tokens)
      throw Error{Refusal::usage, "critical-kv:base", "the base policy does not rank tokens within equal budgets",
                  "a one-shot policy that keeps the highest-scored tokens of every head", base.text};
    plan.score = two_stages(plan);
    return plan;
  }
};

const Registered<CriticalKv> registered;

}  // namespace
}  // namespace kvreplay
