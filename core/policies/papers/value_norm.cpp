#include "policies/plan_part.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

struct ValueNorm {
  static constexpr Card card{
      .name = "value-norm",
      .summary = "the longest values, beside the first and the last tokens",
      .paper = "the value norm of Guo et al. 2024, VATP, arXiv:2406.12335, by itself",
      .score = "s[h,j] = |v_j|_p",
      .family = Family::geometry,
  };

  double order = 2;
  int sinks = 4;
  int window = 8;

  void parameters(Parameters& p) {
    p.add("p", order, RealRange{1.0, 16.0}, "order of the norm");
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "first tokens that always stay");
    p.add("window", window, IntRange{.up_to = UpTo::prompt}, "last tokens that always stay");
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
