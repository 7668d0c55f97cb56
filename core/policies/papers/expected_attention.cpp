#include "policies/scores/expected_attention.h"

#include "policies/policy.h"

namespace kvreplay {
namespace {

struct ExpectedAttentionPolicy {
  static constexpr Card card{
      .name = "expected-attention",
      .summary =
          "Expected attention of future queries (Gaussian model of the prompt's queries) times the L2 norm of the "
          "value",
      .paper = "Devoto et al. 2025, Expected Attention, arXiv:2510.00636",
      .score =
          "s[h,j] = mean over the group of softmax_j(<m, k_j> + k_j' C k_j / 2) |v_j|_2, m and C mean and "
          "covariance of the scaled queries at the next `future` positions",
      .family = Family::attention,
  };

  ExpectedAttention expected = {};
  Grouping grouping = {};

  void parameters(Parameters& p) {
    expected.parameters(p);
    grouping.parameters(p);
  }

  Plan plan() const {
    return {
        .grouping = grouping,
        .score = expected_attention_score(expected),
        .protect = {.sinks = expected.sinks},
    };
  }
};

const Registered<ExpectedAttentionPolicy> registered;

}  // namespace
}  // namespace kvreplay
