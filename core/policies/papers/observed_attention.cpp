#include "policies/policy.h"
#include "policies/scores/attention_scores.h"

namespace kvreplay {
namespace {

struct ObservedAttention {
  static constexpr Card card{
      .name = "observed-attention",
      .summary =
          "Mean attention over the queries that see a token: H2O's accumulated attention without its bias towards "
          "early tokens",
      .paper = "kvpress, ObservedAttentionPress; after Zhang et al. 2023, H2O, arXiv:2306.14048",
      .score = "s[h,j] = 1/(P-j) sum over prompt queries t of softmax_j(q_t k_j)",
      .family = Family::attention,
  };

  Grouping grouping = {};

  void parameters(Parameters& p) { grouping.parameters(p); }

  Plan plan() const { return {.grouping = grouping, .score = observed_score()}; }
};

const Registered<ObservedAttention> registered;

}  // namespace
}  // namespace kvreplay
