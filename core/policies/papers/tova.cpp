#include "policies/policy.h"
#include "policies/scores/attention_scores.h"

namespace kvreplay {
namespace {

struct Tova {
  static constexpr Card card{
      .name = "tova",
      .summary = "what the newest query attends to, all heads of a layer together",
      .paper = "Oren et al. 2024, Transformers are Multi-State RNNs (TOVA), arXiv:2401.06104",
      .score = "s[j] = sum over query heads of softmax_j(q k_j), q the newest query",
      .family = Family::attention,
  };

  bool protect_last = false;

  void parameters(Parameters& p) {
    p.add("protect_last", protect_last, "the newest token stays, as in kvpress; in the authors' code it may go");
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
