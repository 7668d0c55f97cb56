#include "policies/plan_part.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

struct ValueNorm {
  static constexpr Card card{
      .name = "value-norm",
      .summary = "Values with the largest Lp norm, beside sinks and a recent window",
      .paper = "Guo et al. 2024, VATP, arXiv:2406.12335 (the value norm alone)",
      .score = "s[h,j] = |v_j|_p",
      .family = Family::geometry,
  };

  double order = 2;
  int sinks = 4;
  int window = 8;

  void parameters(Parameters& p) {
    p.add("p", order, RealRange{1.0, 16.0}, "order p of the norm");
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens, always kept");
    p.add("window", window, IntRange{.up_to = UpTo::prompt}, "recent window: last tokens, always kept");
  }

  Plan plan() const {
    const auto score = [p = order](const LayerView& view, const Scoring&) { return view.value_norms(p); };
    return {
        .score = {.score = score, .name = name_with_values(card.name, *this)},
        .protect = {.sinks = sinks, .recent = Amount::tokens(window)},
    };
  }
};

const Registered<ValueNorm> registered;

}  // namespace
}  // namespace kvreplay
