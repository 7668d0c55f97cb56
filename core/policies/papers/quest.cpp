#include <vector>

#include "policies/policy.h"
#include "policies/schedules/page_reads.h"
#include "policies/schedules/sparse_reads.h"

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
  DenseLayers dense = {.dense_layers = 2};

  void parameters(Parameters& p) {
    pages.parameters(p);
    dense.parameters(p);
  }

  std::vector<LayerPlan> plans(int layers) const { return dense.plans(layers, pages.schedule()); }
};

const Registered<Quest> registered;

}  // namespace
}  // namespace kvreplay
