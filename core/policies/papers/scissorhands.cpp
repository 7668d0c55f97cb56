#include "policies/policy.h"
#include "policies/scores/attention_counts.h"

namespace kvreplay {
namespace {

struct Scissorhands {
  static constexpr Card card{
      .name = "scissorhands",
      .summary = "how often a token had more than its share of a recent query's attention, and recent tokens",
      .paper = "Liu et al. 2023, Scissorhands, arXiv:2305.17118",
      .score = "s[h,j] = how many of the last `history` queries t have softmax_j(q_t k_j) > 1/(t+1); ties by its sum",
      .family = Family::attention,
  };

  AttentionCounts counts = {};
  Amount recent = Amount::tokens(10);
  Grouping grouping = {};

  void parameters(Parameters& p) {
    counts.parameters(p);
    p.add("recent", recent, "last tokens that always stay");
    grouping.parameters(p);
  }

  Plan plan() const { return {.grouping = grouping, .score = counts.scorer(), .protect = {.recent = recent}}; }
};

const Registered<Scissorhands> registered;

}  // namespace
}  // namespace kvreplay
