#include "policies/allocators/pyramid.h"
#include "policies/policy.h"
#include "policies/scores/window_score.h"

namespace kvreplay {
namespace {

struct PyramidKv : WindowFamily {
  static constexpr Card card{
      .name = "pyramid-kv",
      .summary = "SnapKV scores with per-layer budgets that decrease with depth",
      .paper = "Cai et al. 2024, PyramidKV, arXiv:2406.02069",
      .score = "as snapkv; layer sizes in arithmetic progression from 2b - b/beta to b/beta beside the window",
      .family = Family::budget,
  };

  Pyramid pyramid = {};

  void parameters(Parameters& p) {
    WindowFamily::parameters(p);
    pyramid.parameters(p);
    p.preset({"factory-needle",
              "the needle harness of KVCache-Factory",
              {{"window", "8"}, {"kernel", "7"}, {"pool", "max"}}});
    p.preset({"dynamickv", "PyramidKV in the tables of DynamicKV", {{"window", "8"}}});
  }

  Plan plan() const {
    Plan plan = WindowFamily::plan();
    plan.allocate = by_layer(pyramid.allocator());
    return plan;
  }
};

const Registered<PyramidKv> registered;

}  // namespace
}  // namespace kvreplay
