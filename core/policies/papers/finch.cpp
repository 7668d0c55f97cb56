#include "policies/policy.h"
#include "policies/schedules/question_blocks.h"
#include "policies/scores/question_score.h"
#include "policies/stores/stores.h"

namespace kvreplay {
namespace {

constexpr Choice<Heads> heads_words[] = {{"layer", Heads::layer}, {"kv", Heads::kv}};

struct Finch {
  static constexpr Card card{
      .name = "finch",
      .summary =
          "Prompt-guided compression: the context is processed in blocks and scored by the attention of the question; "
          "kept tokens move to contiguous cache positions",
      .paper = "Corallo and Papotti 2024, FINCH, arXiv:2408.00167, section 5",
      .score =
          "s[x] = sum over heads and question queries p of nu_p softmax_x(q_p k_x), the softmax over resident tokens, "
          "the block, and the question; nu_p the weight of query p (norm)",
      .family = Family::attention,
  };

  QuestionBlocks blocks = {};
  QuestionScore score = {};
  Positions positions = Positions::cache;
  Heads heads = Heads::layer;

  void parameters(Parameters& p) {
    blocks.parameters(p);
    score.parameters(p);
    add_positions(p, positions);
    p.add<Heads>("heads", heads, heads_words, "granularity: a kept set per layer, or per KV head");
    p.preset({"kvpress",
              "defaults of kvpress, which reads the context in one block",
              {{"heads", "kv"}, {"blocks", "1000000000"}}});
  }

  Plan plan() const {
    return {
        .grouping = {.heads = heads},
        .score = score.scorer(),
        .schedule = blocks.schedule(score.question),
        .store = store_at(positions),
    };
  }
};

const Registered<Finch> registered;

}  // namespace
}  // namespace kvreplay
