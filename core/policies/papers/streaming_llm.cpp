#include "policies/policy.h"
#include "policies/schedules/schedules.h"
#include "policies/stores/stores.h"

namespace kvreplay {
namespace {

struct StreamingLlm {
  static constexpr Card card{
      .name = "streaming-llm",
      .summary = "Attention sinks (the first tokens) and a recent window",
      .paper = "Xiao et al. 2023, StreamingLLM, arXiv:2309.17453",
      .score = "none: the first `sinks` and the last B - sinks tokens",
      .family = Family::rule,
  };

  int sinks = 4;
  Positions positions = Positions::original;
  bool rolls = false;

  void parameters(Parameters& p) {
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens, always kept");
    add_positions(p, positions);
    p.add("rolling", rolls, "moves the recent window with each query; the query's own token takes a slot");
  }

  Plan plan() const {
    return {
        .protect = {.sinks = sinks, .recent = Amount::fraction(1.0)},
        .schedule = rolls ? rolling() : once(),
        .store = store_at(positions),
    };
  }
};

const Registered<StreamingLlm> registered;

}  // namespace
}  // namespace kvreplay
