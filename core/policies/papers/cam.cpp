#include "policies/policy.h"
#include "policies/schedules/schedules.h"
#include "policies/stores/merged_values.h"
#include "policies/stores/stores.h"

namespace kvreplay {
namespace {

struct Cam {
  static constexpr Card card{
      .name = "cam",
      .summary =
          "StreamingLLM with the value of each evicted token merged into the tokens behind it, by its attention from "
          "the current query",
      .paper = "Zhang et al. 2024, CaM, ICML (PMLR 235:58840-58850)",
      .score =
          "none: the first `sinks` and the last B - sinks tokens; when e is evicted after query t, v_e / m is added to "
          "the values of the next m tokens with probability clamp(A_e / mean of their A, 0, 1), A the attention of t",
      .family = Family::store,
  };

  int sinks = 4;
  Positions positions = Positions::original;
  OnlineEvictions evictions = {};
  MergedValues merged = {.attention = MergedValues::Attention::current};

  void parameters(Parameters& p) {
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens, always kept");
    add_positions(p, positions);
    evictions.parameters(p);
    merged.parameters(p);
    p.preset({"generate",
              "the authors' scripts for perplexity and generation",
              {{"attention", "cumulative"}, {"merge", "16"}, {"positions", "cache"}}});
  }

  Plan plan() const {
    return {
        .protect = {.sinks = sinks, .recent = Amount::fraction(1.0)},
        .schedule = evictions.schedule(),
        .store = merged.store(positions),
    };
  }
};

const Registered<Cam> registered;

}  // namespace
}  // namespace kvreplay
