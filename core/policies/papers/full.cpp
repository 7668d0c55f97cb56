#include "policies/policy.h"

namespace kvreplay {
namespace {

struct Full {
  static constexpr Card card{
      .name = "full",
      .summary = "keeps every token: the control, with all errors exactly 0",
      .paper = "",
      .score = "none",
      .family = Family::control,
  };

  void parameters(Parameters&) {}

  Plan plan() const { return {.allocate = every_token()}; }
};

const Registered<Full> registered;

}  // namespace
}  // namespace kvreplay
