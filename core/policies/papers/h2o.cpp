#include "policies/policy.h"
#include "policies/scores/attention_scores.h"
#include "policies/selectors/top_k.h"

namespace kvreplay {
namespace {

struct H2o {
  static constexpr Card card{
      .name = "h2o",
      .summary =
          "Heavy hitters (accumulated attention of all prompt queries) and a recent window; one-shot, after the prompt",
      .paper = "Zhang et al. 2023, H2O, arXiv:2306.14048",
      .score = "s[h,j] = sum over prompt queries t of softmax_j(q_t k_j)",
      .family = Family::attention,
  };

  Amount recent = Amount::fraction(0.5);
  Grouping grouping = {};
  bool overlap = false;

  void parameters(Parameters& p) {
    p.add("recent", recent, "recent window: last tokens, always kept");
    grouping.parameters(p);
    const auto read = p.of_part("select");
    p.add("overlap", overlap,
          "heavy hitters may lie in the recent window; fewer than B tokens are kept then (as in H2O's lm-eval mask)");
    p.preset({"sca", "SCA, section 5.1", {{"recent", "0.25"}}});
    p.preset({"sca-threshold", "SCA, section 5.1, with schedule=threshold(4000,2000)", {{"recent", "128"}}});
    p.preset({"factory", "the LongBench harness of KVCache-Factory (PyramidKV's code)", {{"recent", "8"}}});
    p.preset({"factory-needle", "the needle harness of KVCache-Factory", {{"recent", "32"}}});
    p.preset({"dynamickv", "H2O in the tables of DynamicKV", {{"recent", "32"}}});
  }

  Plan plan() const {
    return {
        .grouping = grouping,
        .score = cumulative_score(),
        .protect = {.recent = recent},
        .select = overlap ? top_k_anywhere() : top_k(),
    };
  }
};

const Registered<H2o> registered;

}  // namespace
}  // namespace kvreplay
