#include "policies/policy.h"
#include "policies/schedules/recorded_reads.h"

namespace kvreplay {
namespace {

struct Native {
  static constexpr Card card{
      .name = "native",
      .summary =
          "Sparse reads: all tokens are kept; each query reads the tokens that the model itself selected for it "
          "(/layers/N/visible of the trace), and all tokens in layers without such a selection",
      .paper = "DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556",
      .score = "none: the selection of the model's own indexer, as captured",
      .family = Family::reading,
  };

  void parameters(Parameters&) {}
  Plan plan() const { return {.allocate = every_token(), .schedule = recorded_reads()}; }
};

const Registered<Native> registered;

}  // namespace
}  // namespace kvreplay
