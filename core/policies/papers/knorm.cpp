#include "policies/allocators/skipped_layers.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

struct Knorm {
  static constexpr Card card{
      .name = "knorm",
      .summary = "Keys with the smallest L2 norm, which tend to receive the most attention",
      .paper = "Devoto et al. 2024, L2 norm-based strategy, arXiv:2406.11430",
      .score = "s[h,j] = -|k_j|_2",
      .family = Family::geometry,
  };

  SkippedLayers skipped = {};

  void parameters(Parameters& p) {
    skipped.parameters(p);
    p.preset({"factory", "the LongBench harness of KVCache-Factory", {{"skip_layers", "0,1"}}});
  }

  Plan plan() const {
    const auto score = [](const LayerView& view, const Scoring&) {
      Matrix scores = view.key_norms(2.0);
      for (double& number : scores.values()) number = -number;
      return scores;
    };
    return {.score = {.score = score, .name = "knorm"}, .allocate = skipped.allocator()};
  }
};

const Registered<Knorm> registered;

}  // namespace
}  // namespace kvreplay
