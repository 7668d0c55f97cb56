#include "policies/parts/attention_scores.h"
#include "policies/parts/merged_values.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

struct Cam {
  static constexpr Card card{
      .name = "cam",
      .summary =
          "heavy hitters and recent tokens as h2o keeps them, with the values of evicted tokens merged into the "
          "next ones that stay",
      .paper = "Zhang et al. 2024, CaM, ICML (PMLR 235:58840-58850)",
      .score =
          "as h2o; v_i / m is added to the next m tokens that stay with probability clamp(A_i / mean of their A), A "
          "the attention of all prompt queries",
      .family = Family::store,
  };

  Amount recent = Amount::fraction(0.5);
  Grouping grouping = {};
  MergedValues merged = {};

  void parameters(Parameters& p) {
    p.add("recent", recent, "last tokens that always stay");
    grouping.parameters(p);
    merged.parameters(p);
  }

  Plan plan() const {
    return {
        .grouping = grouping,
        .score = cumulative_score(),
        .protect = {.recent = recent},
        .store = merged.store(),
    };
  }
};

const Registered<Cam> registered;

}  // namespace
}  // namespace kvreplay
