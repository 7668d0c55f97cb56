#include <string>

#include "policies/allocators/dynamic_allocation.h"
#include "policies/policy.h"
#include "policies/scores/window_score.h"

namespace kvreplay {
namespace {

struct DynamicKv : WindowFamily {
  static constexpr Card card{
      .name = "dynamickv",
      .summary =
          "SnapKV scores with per-layer budgets by the number of highest scores in each layer, updated progressively",
      .paper = "Zhou et al. 2024, DynamicKV, arXiv:2412.14838, eqs. 1 to 8 and algorithm 1",
      .score =
          "as snapkv; layer sizes by c_l, the number of the b H N highest scores of the first N layers that are in "
          "layer l",
      .family = Family::budget,
  };

  DynamicAllocation allocation = {};

  void parameters(Parameters& p) {
    WindowFamily::parameters(p);
    allocation.parameters(p);
    // The authors' scripts differ between models in pooling and r_max.
    const auto script = [&p](const char* name, const char* model, const char* pool, const char* r_max) {
      p.preset({name,
                std::string("the authors' script for ") + model,
                {{"window", "8"}, {"kernel", "7"}, {"pool", pool}, {"r_max", r_max}}});
    };
    script("llama-3", "Llama 3", "avg", "10");
    script("internlm", "InternLM 2.5", "avg", "10");
    script("mistral", "Mistral", "max", "10");
    script("qwen2", "Qwen2", "max", "5");
  }

  Plan plan() const {
    Plan plan = WindowFamily::plan();
    plan.allocate = across_layers(allocation.allocator());
    return plan;
  }
};

const Registered<DynamicKv> registered;

}  // namespace
}  // namespace kvreplay
