#include "policies/policy.h"
#include "policies/scores/question_score.h"
#include "policies/scores/recency_window.h"
#include "policies/selectors/sampled.h"

namespace kvreplay {
namespace {

struct Nacl {
  static constexpr Card card{
      .name = "nacl",
      .summary =
          "Proxy-token eviction by the attention of the question that ends the prompt, combined with random eviction; "
          "the question is protected",
      .paper = "Chen et al. 2024, NACL, arXiv:2408.03675",
      .score = "s[h,j] = sum over the question's queries t of softmax_j(q_t k_j)",
      .family = Family::attention,
  };

  Question question = {};
  Sampled sampled = {};
  Grouping grouping = {};

  void parameters(Parameters& p) {
    question.parameters(p);
    sampled.parameters(p);
    grouping.parameters(p);
  }

  Plan plan() const {
    return {
        .grouping = grouping,
        .score = RecencyWindow{.distance_weight = 1.0}.scorer(),
        .protect = {.question = question.ending()},
        .select = sampled.selector(),
    };
  }
};

const Registered<Nacl> registered;

}  // namespace
}  // namespace kvreplay
