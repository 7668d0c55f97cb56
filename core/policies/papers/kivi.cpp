#include "policies/policy.h"
#include "policies/stores/quantised.h"

namespace kvreplay {
namespace {

struct Kivi {
  static constexpr Card card{
      .name = "kivi",
      .summary = "Quantised cache: keys per channel, values per token; nothing is evicted",
      .paper = "Liu et al. 2024, KIVI, arXiv:2402.02750; ChunkKV, section 4.5",
      .score = "none; x is stored as q s + m, with q of `bits` bits, and s and m in half precision for each group",
      .family = Family::store,
  };

  Quantised quantised = {};

  void parameters(Parameters& p) {
    quantised.parameters(p);
    p.preset({"kivi", "settings of KIVI", {{"group", "32"}, {"residual", "128"}}});
    p.preset({"table11", "sizes of ChunkKV, Table 11", {{"group", "64"}, {"residual", "0"}}});
  }

  Plan plan() const { return {.allocate = every_token(), .store = quantised.store()}; }
};

const Registered<Kivi> registered;

}  // namespace
}  // namespace kvreplay
