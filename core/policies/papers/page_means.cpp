#include "policies/policy.h"
#include "policies/schedules/page_reads.h"
#include "policies/schedules/sparse_reads.h"

namespace kvreplay {
namespace {

struct PageMeans {
  static constexpr Card card{
      .name = "page-means",
      .summary =
          "Sparse reads: all tokens are kept; each query of each head reads the pages whose mean key has the largest "
          "product with it",
      .paper = "after Lu et al. 2025, MoBA, arXiv:2502.13189, without training",
      .score = "of a page: <q, mean of its keys>",
      .family = Family::reading,
  };

  PageReads pages = {.rank_by = PageRank::mean};
  DenseLayers dense = {};

  void parameters(Parameters& p) {
    pages.parameters(p);
    dense.parameters(p);
  }

  std::vector<LayerPlan> plans(int layers) const { return dense.plans(layers, pages.schedule()); }
};

const Registered<PageMeans> registered;

}  // namespace
}  // namespace kvreplay
