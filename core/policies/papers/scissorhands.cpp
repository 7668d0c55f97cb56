#include "policies/policy.h"
#include "policies/scores/attention_counts.h"

namespace kvreplay {
namespace {

struct Scissorhands {
  static constexpr Card card{
      .name = "scissorhands",
      .summary = "Number of recent queries that give a token more than the average attention, and a recent window",
      .paper = "Liu et al. 2023, Scissorhands, arXiv:2305.17118",
      .score =
          "s[h,j] = number of the last `history` queries t with softmax_j(q_t k_j) > 1/(t+1); ties broken by the "
          "summed attention",
      .family = Family::attention,
  };

  AttentionCounts counts = {};
  Amount recent = Amount::tokens(10);
  Grouping grouping = {};

  void parameters(Parameters& p) {
    counts.parameters(p);
    p.add("recent", recent, "recent window: last tokens, always kept");
    grouping.parameters(p);
  }

  Plan plan() const { return {.grouping = grouping, .score = counts.scorer(), .protect = {.recent = recent}}; }
};

const Registered<Scissorhands> registered;

}  // namespace
}  // namespace kvreplay
