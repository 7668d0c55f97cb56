#include "policies/policy.h"

namespace kvreplay {
namespace {

struct Full {
  static constexpr Card card{
      .name = "full",
      .summary = "Full cache: keeps every token, so that all errors are exactly 0",
      .paper = "",
      .score = "none",
      .family = Family::control,
      .other_names = "FullKV",
  };

  void parameters(Parameters&) {}

  Plan plan() const { return {.allocate = every_token()}; }
};

const Registered<Full> registered;

}  // namespace
}  // namespace kvreplay
