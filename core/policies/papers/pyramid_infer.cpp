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
      .summary = "Layer-wise pruning: each layer keeps a subset of the tokens kept by the previous layer",
      .paper = "Yang et al. 2024, PyramidInfer, arXiv:2405.12532",
      .score =
          "s[j] = sum over heads and recent queries i of rho_i softmax_j(q_i k_j) over the previous layer's set, rho_i "
          "the weight of query i",
      .family = Family::budget,
  };

  Amount recent = Amount::fraction(0.2);
  int sinks = 4;
  Decay decay = {};
  RecencyWindow score = {};
  Lengths lengths = Lengths::scaled;

  void parameters(Parameters& p) {
    p.add("recent", recent, "recent window: its queries score the prompt, its tokens are always kept");
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens, always kept");
    decay.parameters(p);
    score.parameters(p);
    p.add<Lengths>("lengths", lengths, lengths_words,
                   "layer sizes scaled to the budget, or those of the original, which ignore the budget");
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
