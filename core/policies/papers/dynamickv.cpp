#include "policies/parts/dynamic_allocation.h"
#include "policies/parts/window_score.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

struct DynamicKv : WindowFamily {
  static constexpr Card card{
      .name = "dynamickv",
      .summary = "SnapKV's scores; each layer's budget by how many of the best entries it has",
      .paper = "Zhou et al. 2024, DynamicKV, arXiv:2412.14838, eqs. 1 to 8 and algorithm 1",
      .score = "as snapkv; layer sizes by the number c_l of the best b H N entries of the first N layers in layer l",
      .family = Family::budget,
  };

  DynamicAllocation allocation = {};

  void parameters(Parameters& p) {
    WindowFamily::parameters(p);
    allocation.parameters(p);
  }

  Plan plan() const {
    Plan plan = WindowFamily::plan();
    plan.allocate = allocation.allocator();
    return plan;
  }
};

const Registered<DynamicKv> registered;

}  // namespace
}  // namespace kvreplay
