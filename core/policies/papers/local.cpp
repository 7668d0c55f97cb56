#include "policies/parts/top_k.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

struct Local {
  static constexpr Card card{
      .name = "local",
      .summary = "the most recent tokens",
      .paper = "",
      .score = "none: the last B tokens",
  };

  void parameters(Parameters&) {}

  Plan plan() const { return {.select = top_k({.recent = Amount::fraction(1.0)})}; }
};

const Registered<Local> registered;

}  // namespace
}  // namespace kvreplay
