#include "policies/policy.h"
#include "policies/selectors/rules.h"

namespace kvreplay {
namespace {

struct Strided {
  static constexpr Card card{
      .name = "strided",
      .summary = "Tokens at equal distances, as in strided sparse attention",
      .paper = "Child et al. 2019, arXiv:1904.10509; SCA, section 5",
      .score = "none: tokens floor(i P / B), i = 0 ... B-1",
      .family = Family::rule,
  };

  void parameters(Parameters&) {}

  Plan plan() const { return {.select = stride()}; }
};

const Registered<Strided> registered;

}  // namespace
}  // namespace kvreplay
