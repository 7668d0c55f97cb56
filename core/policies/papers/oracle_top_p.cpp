#include <cmath>
#include <span>

#include "observables/query_products.h"
#include "policies/arithmetic/top_share.h"
#include "policies/policy.h"
#include "policies/schedules/sparse_reads.h"
#include "policies/schedules/token_reads.h"

namespace kvreplay {
namespace {

struct OracleTopP {
  static constexpr Card card{
      .name = "oracle-top-p",
      .summary =
          "Sparse reads: all tokens are kept; each query of each head reads its largest attention weights up to a "
          "share "
          "`p` of their sum",
      .paper = "skylight-org/sparse-attention-hub, OracleTopPMasker",
      .score = "s[t,j] = exp z(t,j), z the logit",
      .family = Family::reading,
  };

  TokenReads tokens = {};
  double p = 0.9;
  DenseLayers dense = {};

  void parameters(Parameters& all) {
    all.add("p", p, RealRange{0.0, 1.0},
            "share of the attention weights of the tokens that are not read in any case; the tokens with the largest "
            "weights are read until their sum exceeds it");
    tokens.parameters(all);
    dense.parameters(all);
  }

  static TokenIndex index(const LayerView& view) {
    return {.scores = [&view](int query, int first, int end) {
      Matrix logits = query_products(view.tensors(), query, first, end, view.backend().threads());
      const double scale = view.tensors().softmax_scale, cap = view.tensors().logit_softcap;
      for (double& z : logits.values()) z = cap > 0 ? cap * std::tanh(z * scale / cap) : z * scale;
      return logits;
    }};
  }

  std::vector<LayerPlan> plans(int layers) const {
    const auto read = [share = p](std::span<const double> logits) { return top_share(logits, share); };
    return dense.plans(layers, tokens.selected_by(index, read));
  }
};

const Registered<OracleTopP> registered;

}  // namespace
}  // namespace kvreplay
