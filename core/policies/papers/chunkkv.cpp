#include "policies/policy.h"
#include "policies/scores/window_score.h"
#include "policies/selectors/chunks.h"
#include "policies/sharing/sharing.h"

namespace kvreplay {
namespace {

struct ChunkKv {
  static constexpr Card card{
      .name = "chunkkv",
      .summary =
          "Chunks of consecutive tokens by the attention of the observation window; one set per layer (our reading of "
          "the paper), which adjacent layers may reuse",
      .paper = "Liu et al. 2025, ChunkKV, arXiv:2502.00299, algorithms 1 and 2",
      .score = "s[chunk] = sum over its tokens j and the last `window` queries t of softmax_j(q_t k_j)",
      .family = Family::chunk,
  };

  // Algorithm 1 is written for one head. One set per layer is our reading: kvpress sums scores over heads; ports of
  // KVCache-Factory keep a set per head.
  Grouping grouping{.heads = Heads::layer};
  Chunks chunks = {};
  int window = 8;
  int reuse = 1;

  void parameters(Parameters& p) {
    chunks.parameters(p);
    add_window(p, window);
    grouping.parameters(p);
    const auto read = p.of_part("share");
    p.add("reuse", reuse, IntRange{.least = 1, .up_to = UpTo::layers},
          "number of adjacent layers that use the set of the first of them");
    p.preset({"kvpress",
              "ChunkKVPress(SnapKVPress(kernel_size=1)) of kvpress",
              {{"chunk", "20"}, {"window", "64"}, {"window_mode", "whole"}}});
  }

  Plan plan() const {
    return {
        .grouping = grouping,
        .score = WindowScore{.window = window, .pool = Pool::none}.scorer(),
        .protect = {.recent = Amount::tokens(window)},
        .select = chunks.selector(),
        .share = every(reuse),
    };
  }
};

const Registered<ChunkKv> registered;

}  // namespace
}  // namespace kvreplay
