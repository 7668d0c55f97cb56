#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policies/policy.h"
#include "policies/text/configured.h"
#include "policies/text/inner_policy.h"

namespace kvreplay {
namespace {

struct Dms {
  static constexpr Card card{
      .name = "dms",
      .summary =
          "Threshold: evicts the tokens before the recent window whose score by a base policy is below a number; the "
          "paper trains a predictor of this decision",
      .paper = "after Lancucki et al. 2025, DMS, arXiv:2506.05345, as in kvpress (DMSPress)",
      .score = "s of the base; a KV head keeps the recent window and each earlier j with s[h,j] >= threshold",
      .family = Family::budget,
  };

  InnerPolicy base = {};
  std::string threshold = "none";
  int recent = 128;
  std::uint64_t seed = 0;

  void parameters(Parameters& p) {
    p.add(
        "base", base.text, "(POLICY)", [this](std::string_view text) { return base.set(text, seed); },
        "required: policy whose scores are compared with the threshold");
    const auto normal = [](std::string_view text) {
      return text == "none" ? std::string(text) : fmt::format("{}", parse_real("dms:threshold", text));
    };
    p.add("threshold", threshold, "a number", normal,
          "required: lowest score of a kept token, in the unit of the base's scores");
    p.add("recent", recent, IntRange{.up_to = UpTo::prompt}, "recent window: last tokens, always kept");
  }

  void set_seed(std::uint64_t given) { seed = given; }

  std::vector<Source> sources() const { return base.sources(); }

  /// plan() checks the required parameters.
  void check() const {}

  /// The base's scores, beside the tokens that the base itself protects.
  static Scorer scores_of(const Plan& of_base) {
    Scorer scorer = of_base.score;
    scorer.score = [of_base](const LayerView& view, const Scoring& how) {
      const Protection::Clamped own = of_base.protect.within(view.prompt(), view.prompt(), view.question());
      Scoring of_own = how;
      of_own.sinks = own.sinks;
      of_own.recent = of_own.observing = own.recent;
      return of_base.score.score(view, of_own);
    };
    scorer.reads_recent = scorer.reads_sinks = false;
    scorer.of_prompt = true;
    if (!scorer.name.empty()) scorer.name = "dms(" + scorer.name + ")";
    return scorer;
  }

  Plan plan() const {
    if (!base || threshold == "none")
      throw Error{Refusal::usage, base ? "dms:threshold" : "dms:base", base ? "no threshold" : "no policy",
                  "base=(POLICY),threshold=NUMBER, as in base=(knorm),threshold=-20", "none"};
    constexpr int some_layers = 2;
    const std::vector<LayerPlan> plans = base->plans(some_layers);
    Plan plan = plans.front().plan;
    if (plans.size() > 1 || !plan.score || !plan.select.takes_best || plan.score.reads_budget || !has_budget(plan) ||
        plan.schedule->decided() != Decision::after_prefill || !plan.allocate->is_uniform)
      throw Error{Refusal::usage, "dms:base", "the base policy has no scores apart from a budget",
                  "a one-shot policy that keeps the highest-scored tokens of every head", base.text};
    plan.score = scores_of(plan);
    plan.protect = {.recent = Amount::tokens(recent)};
    plan.own_memory = true;
    plan.allocate = within_layer([least = parse_real("dms:threshold", threshold)](const Division& division,
                                                                                  const Matrix& scores) {
      std::vector<int> counts;
      for (int row = 0; row < scores.rows(); ++row)
        counts.push_back(division.recent + static_cast<int>(std::ranges::count_if(
                                               scores.row(row).first(static_cast<std::size_t>(division.candidates())),
                                               [least](double score) { return score >= least; })));
      return counts;
    });
    return plan;
  }
};

const Registered<Dms> registered;

}  // namespace
}  // namespace kvreplay
