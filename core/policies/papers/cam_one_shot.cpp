#include "policies/policy.h"
#include "policies/scores/attention_scores.h"
#include "policies/stores/merged_values.h"

namespace kvreplay {
namespace {

struct CamOneShot {
  static constexpr Card card{
      .name = "cam-one-shot",
      .summary =
          "H2O with the values of evicted tokens merged into kept ones, one-shot; cam evicts and merges step by step",
      .paper = "after Zhang et al. 2024, CaM, ICML (PMLR 235:58840-58850)",
      .score =
          "as h2o; v_i / m is added to the values of the next m kept tokens with probability clamp(A_i / mean of their "
          "A), A the accumulated attention of all prompt queries",
      .family = Family::store,
  };

  Amount recent = Amount::fraction(0.5);
  Grouping grouping = {};
  MergedValues merged = {};

  void parameters(Parameters& p) {
    p.add("recent", recent, "recent window: last tokens, always kept");
    grouping.parameters(p);
    merged.parameters(p);
    p.preset({"factory", "the LongBench harness of KVCache-Factory", {{"recent", "8"}}});
    p.preset({"factory-needle", "the needle harness of KVCache-Factory", {{"recent", "32"}}});
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

const Registered<CamOneShot> registered;

}  // namespace
}  // namespace kvreplay
