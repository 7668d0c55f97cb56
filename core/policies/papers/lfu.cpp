#include "policies/policy.h"
#include "policies/scores/uses.h"

namespace kvreplay {
namespace {

struct Lfu {
  static constexpr Card card{
      .name = "lfu",
      .summary =
          "Control, least frequently used: the number of queries that give a token more than the average attention",
      .paper = "",
      .score =
          "s[h,j] = number of queries t > j with mean over the group of softmax_j(q_t k_j) > 1/(t+1); ties broken by "
          "the last of them",
      .family = Family::attention,
  };

  Amount recent = Amount::tokens(1);

  void parameters(Parameters& p) { p.add("recent", recent, "recent window: last tokens, always kept"); }

  Plan plan() const { return {.score = use_count_score(), .protect = {.recent = recent}}; }
};

const Registered<Lfu> registered;

}  // namespace
}  // namespace kvreplay
