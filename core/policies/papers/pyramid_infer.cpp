#include "policies/allocators/decay.h"
#include "policies/policy.h"
#include "policies/scores/recency_window.h"

namespace kvreplay {
namespace {

enum class Lengths {
  scaled,  // the shape of the original's sizes, scaled to L * B slots; layer l selects for itself
  natural  // the original's own sizes, whatever the budget; what layer l prunes is missing from layer l+1 on
};

constexpr Choice<Lengths> lengths_words[] = {{"scaled", Lengths::scaled}, {"natural", Lengths::natural}};

struct PyramidInfer {
  static constexpr Card card{
      .name = "pyramid-infer",
      .summary = "each layer keeps fewer of the tokens that the layer before it kept",
      .paper = "Yang et al. 2024, PyramidInfer, arXiv:2405.12532",
      .score = "s[j] = sum over heads and recent queries i of rho_i softmax_j(q_i k_j) over the previous layer's set",
      .family = Family::budget,
  };

  Amount recent = Amount::fraction(0.2);
  int sinks = 4;
  Decay decay = {};
  RecencyWindow score = {};
  Lengths lengths = Lengths::scaled;

  void parameters(Parameters& p) {
    p.add("recent", recent, "last tokens, whose queries vote and which stay");
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "first tokens that always stay");
    decay.parameters(p);
    score.parameters(p);
    p.add<Lengths>("lengths", lengths, lengths_words,
                   "layer sizes scaled to the budget, or the original's own, which no budget binds");
  }

  Plan plan() const {
    Plan plan{
        .grouping = {.heads = Heads::layer},
        .score = score.scorer(),
        .protect = {.sinks = sinks, .recent = recent, .least_recent = 1},
        .allocate = by_layer(decay.scaled()),
        .nesting = Nesting::within_previous,
    };
    if (lengths == Lengths::natural) {
      plan.protect.recent_of_prompt = true;
      plan.allocate = by_layer(decay.natural());
      plan.nesting = Nesting::prunes_next;
    }
    return plan;
  }
};

const Registered<PyramidInfer> registered;

}  // namespace
}  // namespace kvreplay
