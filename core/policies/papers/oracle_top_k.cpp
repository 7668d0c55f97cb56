#include "observables/query_products.h"
#include "policies/policy.h"
#include "policies/schedules/sparse_reads.h"
#include "policies/schedules/token_reads.h"

namespace kvreplay {
namespace {

struct OracleTopK {
  static constexpr Card card{
      .name = "oracle-top-k",
      .summary =
          "Sparse reads: all tokens are kept; each query of each head reads the tokens with its largest logits (bound "
          "for sparse reads of equally many tokens)",
      .paper = "skylight-org/sparse-attention-hub, OracleTopKMasker",
      .score = "s[t,j] = <q_t, k_j>",
      .family = Family::reading,
  };

  TokenReads tokens = {};
  DenseLayers dense = {};

  void parameters(Parameters& p) {
    tokens.parameters(p);
    dense.parameters(p);
  }

  static TokenIndex index(const LayerView& view) {
    return {.scores = [&view](int query, int first, int end) {
      return query_products(view.tensors(), query, first, end, view.backend().threads());
    }};
  }

  std::vector<LayerPlan> plans(int layers) const { return dense.plans(layers, tokens.best_of(index)); }
};

const Registered<OracleTopK> registered;

}  // namespace
}  // namespace kvreplay
