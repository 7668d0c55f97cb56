#include "policies/allocators/ada.h"
#include "policies/policy.h"
#include "policies/scores/window_score.h"

namespace kvreplay {
namespace {

struct AdaKv : WindowFamily {
  static constexpr Card card{
      .name = "ada-kv",
      .summary = "SnapKV with more slots for the heads that a layer's best entries lie in",
      .paper = "Feng et al. 2024, Ada-KV, arXiv:2407.11550, algorithm 1",
      .score =
          "as snapkv; head h gets slots in proportion to (1 - alpha) c[h] + alpha b, c of a layer's best b H entries",
      .family = Family::budget,
  };

  AdaptiveHeads adaptive = {};

  void parameters(Parameters& p) {
    WindowFamily::parameters(p);
    adaptive.parameters(p);
  }

  Plan plan() const {
    Plan plan = WindowFamily::plan();
    plan.allocate = within_layer(adaptive.allocator());
    return plan;
  }
};

const Registered<AdaKv> registered;

}  // namespace
}  // namespace kvreplay
