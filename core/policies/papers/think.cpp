#include "policies/policy.h"
#include "policies/stores/fewer_channels.h"

namespace kvreplay {
namespace {

struct Think {
  static constexpr Card card{
      .name = "think",
      .summary = "Query-driven pruning of key channels; nothing is evicted",
      .paper = "Xu et al. 2024, ThinK, arXiv:2407.21018",
      .score =
          "of channel c of a KV head: group mean of (mean over the last `window` queries of q_c^2) * mean over keys "
          "of k_c^2",
      .family = Family::store,
  };

  FewerChannels channels = {};

  void parameters(Parameters& p) {
    channels.parameters(p);
    p.preset({"kvpress", "defaults of kvpress", {{"recent", "0"}}});
  }

  Plan plan() const { return {.allocate = every_token(), .store = channels.store()}; }
};

const Registered<Think> registered;

}  // namespace
}  // namespace kvreplay
