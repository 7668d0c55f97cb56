#include "policies/parts/top_k.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

struct StreamingLlm {
  static constexpr Card card{
      .name = "streaming-llm",
      .summary = "the first tokens, which attract attention whatever they say, and the most recent ones",
      .paper = "Xiao et al. 2023, arXiv:2309.17453",
      .score = "none: the first `sinks` and the last B - sinks tokens, at their original positions",
  };

  int sinks = 4;

  void parameters(Parameters& p) {
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "first tokens that always stay");
  }

  Plan plan() const { return {.select = top_k({.sinks = sinks, .recent = Amount::fraction(1.0)})}; }
};

const Registered<StreamingLlm> registered;

}  // namespace
}  // namespace kvreplay
