#include "policies/scores/leverage.h"

#include "policies/plan_part.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

struct LeverageScores {
  static constexpr Card card{
      .name = "leverage",
      .summary = "Leverage scores of the keys before RoPE",
      .paper = "Chari and Van Durme 2025, Compactor, arXiv:2507.08143 (the leverage scores alone)",
      .score =
          "s[h,j] = z(x_j' (X'X + ridge I)^-1 x_j), X the keys before RoPE minus their mean, z: z-scores over the "
          "layer",
      .family = Family::geometry,
      .other_names = "LeverageScorePress",
  };

  Leverage leverage = {};

  void parameters(Parameters& p) {
    leverage.parameters(p);
    p.add("ridge", leverage.ridge, RealRange{1e-6, 1e6}, "number added to the diagonal of X'X");
    p.preset({"kvpress", "defaults of kvpress", {{"sketch", "48"}}});
  }

  Plan plan() const {
    const auto score = [scores = leverage](const LayerView& view, const Scoring&) { return scores(view); };
    return {.score = {.score = score, .needs = {.rope = true}, .name = name_with_values(card.name, *this)}};
  }
};

const Registered<LeverageScores> registered;

}  // namespace
}  // namespace kvreplay
