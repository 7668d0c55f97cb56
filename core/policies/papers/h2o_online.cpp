#include "policies/policy.h"
#include "policies/schedules/schedules.h"
#include "policies/scores/attention_scores.h"

namespace kvreplay {
namespace {

struct H2oOnline {
  static constexpr Card card{
      .name = "h2o-online",
      .summary = "H2O's online algorithm: evicts the token with the least accumulated attention after each new token",
      .paper = "Zhang et al. 2023, H2O, arXiv:2306.14048, algorithm 1",
      .score = "acc[h,j] = sum over queries t >= j of softmax_j(q_t k_j) over the tokens resident at t",
      .family = Family::attention,
  };

  Amount recent = Amount::fraction(0.5);
  Heads heads = Heads::kv;
  OnlineEvictions evictions = {};

  void parameters(Parameters& p) {
    p.add("recent", recent, "recent window: last tokens, never evicted, the newest included");
    add_heads(p, heads);
    evictions.parameters(p);
  }

  Plan plan() const {
    return {
        .grouping = {.heads = heads},
        .score = cumulative_score(),
        .protect = {.recent = recent, .least_recent = 1},
        .schedule = evictions.schedule(),
    };
  }
};

const Registered<H2oOnline> registered;

}  // namespace
}  // namespace kvreplay
