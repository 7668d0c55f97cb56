#include "policies/parts/top_k.h"
#include "policies/parts/window_score.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

struct SnapKv {
  static constexpr Card card{
      .name = "snapkv",
      .summary = "what the last prompt queries attend to, pooled over neighbours, and those queries' own tokens",
      .paper = "Li et al. 2024, arXiv:2404.14469",
      .score =
          "s[h,j] = pool over j of the group mean of the sum over the last `window` queries t of softmax_j(q_t k_j)",
  };

  WindowScore score = {};

  void parameters(Parameters& p) { score.parameters(p); }

  Plan plan() const {
    return {
        .heads = score.grouping.heads,
        .needs = last_queries(score.window),
        .score = score,
        .select = top_k({.recent = Amount::tokens(score.window)}),
    };
  }
};

const Registered<SnapKv> registered;

}  // namespace
}  // namespace kvreplay
