#include <algorithm>
#include <vector>

#include "observables/reconstruction.h"
#include "policies/allocators/allocation.h"
#include "policies/plan_part.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

struct KvZip {
  static constexpr Card card{
      .name = "kvzip",
      .summary =
          "Largest attention that a token receives while the model repeats the prompt; all layers and heads "
          "share one budget",
      .paper = "Kim et al. 2025, KVzip, arXiv:2505.23416",
      .score =
          "s[h,j] = max over the group and over the queries t of the pass that repeats j of softmax_j(q_t k_j), "
          "the softmax over sinks, repeated tokens and the pass",
      .family = Family::attention,
  };

  int sinks = 4;
  Grouping grouping = {.aggregate = Aggregate::max};

  void parameters(Parameters& p) {
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens, always kept");
    grouping.parameters(p);
  }

  static Matrix score(const LayerView& view, const Scoring& how) {
    std::vector<PassTokens> reads;
    for (const ReconstructionPass& pass : view.place().reconstruction.passes)
      reads.push_back({std::min(how.sinks, pass.first), pass.first, pass.last});
    return how.grouping(largest_attention_of_passes(view, reads), view.group());
  }

  Plan plan() const {
    return {
        .grouping = grouping,
        .score = {.score = score,
                  .needs = {.reconstruction = true},
                  .reads_sinks = true,
                  .of_prompt = true,
                  .quadratic = true,
                  .name = "kvzip"},
        .protect = {.sinks = sinks},
        .allocate = across_layers(ranked_across_layers),
    };
  }
};

const Registered<KvZip> registered;

}  // namespace
}  // namespace kvreplay
