#include "policies/policy.h"
#include "policies/schedules/schedules.h"
#include "policies/stores/stores.h"

namespace kvreplay {
namespace {

struct StreamingLlm {
  static constexpr Card card{
      .name = "streaming-llm",
      .summary = "the first tokens, which attract attention whatever they say, and the most recent ones",
      .paper = "Xiao et al. 2023, StreamingLLM, arXiv:2309.17453",
      .score = "none: the first `sinks` and the last B - sinks tokens",
      .family = Family::rule,
  };

  int sinks = 4;
  Positions positions = Positions::original;
  bool rolls = false;

  void parameters(Parameters& p) {
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "first tokens that always stay");
    add_positions(p, positions);
    p.add("rolling", rolls, "the last tokens are those before each query, which takes a slot itself");
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
