#include <algorithm>
#include <vector>

#include "policies/policy.h"
#include "policies/schedules/page_reads.h"

namespace kvreplay {
namespace {

struct Quest {
  static constexpr Card card{
      .name = "quest",
      .summary =
          "Sparse reads: all tokens are kept; each query of each head reads the pages with the largest upper bounds on "
          "its logits",
      .paper = "Tang et al. 2024, Quest, arXiv:2406.10774",
      .score = "of a page: sum over channels c of max(q_c min_c, q_c max_c), min_c and max_c over the keys of the page",
      .family = Family::reading,
  };

  PageReads pages = {};
  int dense_layers = 2;

  void parameters(Parameters& p) {
    pages.parameters(p);
    p.add("dense_layers", dense_layers, IntRange{.up_to = UpTo::layers},
          "first layers, in which each query reads all tokens");
  }

  std::vector<LayerPlan> plans(int layers) const {
    const int dense = std::min(dense_layers, layers);
    std::vector<LayerPlan> all;
    if (dense > 0) all.push_back({0, dense, {.allocate = every_token()}});
    if (dense < layers)
      all.push_back({dense, layers - dense, {.allocate = every_token(), .schedule = pages.schedule()}});
    return all;
  }
};

const Registered<Quest> registered;

}  // namespace
}  // namespace kvreplay
