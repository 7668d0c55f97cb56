#include "policies/policy.h"
#include "policies/scores/uses.h"

namespace kvreplay {
namespace {

struct Lru {
  static constexpr Card card{
      .name = "lru",
      .summary =
          "Control, least recently used: the position of the last query that gives a token more than the average "
          "attention",
      .paper = "",
      .score =
          "s[h,j] = last query t > j with mean over the group of softmax_j(q_t k_j) > 1/(t+1), and j if there is none",
      .family = Family::attention,
  };

  Amount recent = Amount::tokens(1);

  void parameters(Parameters& p) { p.add("recent", recent, "recent window: last tokens, always kept"); }

  Plan plan() const { return {.score = last_use_score(), .protect = {.recent = recent}}; }
};

const Registered<Lru> registered;

}  // namespace
}  // namespace kvreplay
