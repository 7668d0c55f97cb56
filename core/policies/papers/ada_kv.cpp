#include "policies/allocators/ada.h"
#include "policies/policy.h"
#include "policies/scores/window_score.h"

namespace kvreplay {
namespace {

struct AdaKv : WindowFamily {
  static constexpr Card card{
      .name = "ada-kv",
      .summary = "SnapKV scores with per-head budgets by the number of the layer's highest scores in each head",
      .paper = "Feng et al. 2024, Ada-KV, arXiv:2407.11550, algorithm 1",
      .score =
          "as snapkv; slots of head h in proportion to (1 - alpha) c[h] + alpha b, c[h] the number of the layer's b H "
          "highest scores in head h",
      .family = Family::budget,
  };

  AdaptiveHeads adaptive = {};

  void parameters(Parameters& p) {
    WindowFamily::parameters(p);
    adaptive.parameters(p);
    p.add_to_preset("factory", "normalise", "true");
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
