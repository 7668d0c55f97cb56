#include "policies/policy.h"

namespace kvreplay {
namespace {

struct Local {
  static constexpr Card card{
      .name = "local",
      .summary = "Sliding window: the most recent tokens",
      .paper = "SCA, Table 3",
      .score = "none: the last B tokens",
      .family = Family::rule,
  };

  void parameters(Parameters&) {}

  Plan plan() const { return {.protect = {.recent = Amount::fraction(1.0)}}; }
};

const Registered<Local> registered;

}  // namespace
}  // namespace kvreplay
