#include "policies/policy.h"
#include "policies/scores/attention_scores.h"

namespace kvreplay {
namespace {

struct Tova {
  static constexpr Card card{
      .name = "tova",
      .summary = "Attention weights of the last query, averaged over the heads of a layer",
      .paper = "Oren et al. 2024, Transformers are Multi-State RNNs (TOVA), arXiv:2401.06104",
      .score = "s[j] = sum over query heads of softmax_j(q k_j), q the last query (the same order as their mean)",
      .family = Family::attention,
  };

  bool protect_last = false;

  void parameters(Parameters& p) {
    p.add("protect_last", protect_last, "protects the newest token, as kvpress does; the authors' code may evict it");
    p.preset({"kvpress", "defaults of kvpress", {{"protect_last", "true"}}});
  }

  Plan plan() const {
    return {
        .grouping = {.heads = Heads::layer},
        .score = newest_score(),
        .protect = {.recent = Amount::tokens(protect_last ? 1 : 0)},
    };
  }
};

const Registered<Tova> registered;

}  // namespace
}  // namespace kvreplay
