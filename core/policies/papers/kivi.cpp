#include "policies/policy.h"
#include "policies/stores/quantised.h"

namespace kvreplay {
namespace {

struct Kivi {
  static constexpr Card card{
      .name = "kivi",
      .summary = "every token, with keys quantised per channel and values per token",
      .paper = "Liu et al. 2024, KIVI, arXiv:2402.02750; ChunkKV, section 4.5",
      .score = "none; x is given back as q s + m, q of `bits` bits, s and m of each group in half precision",
      .family = Family::store,
  };

  Quantised quantised = {};

  void parameters(Parameters& p) {
    quantised.parameters(p);
    p.preset({"kivi", "KIVI's own settings", {{"group", "32"}, {"residual", "128"}}});
    p.preset({"table11", "the sizes in ChunkKV's Table 11", {{"group", "64"}, {"residual", "0"}}});
  }

  Plan plan() const { return {.allocate = every_token(), .store = quantised.store()}; }
};

const Registered<Kivi> registered;

}  // namespace
}  // namespace kvreplay
