#include "policies/policy.h"
#include "policies/scores/window_score.h"

namespace kvreplay {
namespace {

struct SnapKv : WindowFamily {
  static constexpr Card card{
      .name = "snapkv",
      .summary = "Attention of the observation window, pooled over neighbouring tokens",
      .paper = "Li et al. 2024, SnapKV, arXiv:2404.14469",
      .score =
          "s[h,j] = pool over j of the group mean of the sum over the last `window` queries t of softmax_j(q_t k_j)",
      .family = Family::attention,
  };

  void parameters(Parameters& p) {
    WindowFamily::parameters(p);
    p.preset({"factory-needle",
              "the needle harness of KVCache-Factory",
              {{"window", "32"}, {"kernel", "7"}, {"pool", "max"}}});
    p.preset({"dynamickv", "SnapKV in the tables of DynamicKV", {{"window", "32"}}});
  }
};

const Registered<SnapKv> registered;

}  // namespace
}  // namespace kvreplay
