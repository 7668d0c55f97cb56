#include <cstdint>
#include <string>
#include <vector>

#include "policies/configured.h"
#include "policies/parts/allocation.h"
#include "policies/parts/attention_scores.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

enum class Scope { head, layer, global };

constexpr Choice<Scope> scope_words[] = {{"head", Scope::head}, {"layer", Scope::layer}, {"global", Scope::global}};

struct Oracle {
  static constexpr Card card{
      .name = "oracle",
      .summary = "what the eval queries will attend to: the most recall that any fixed set with its counts can have",
      .paper = "",
      .score = "s[h,j] = sum over eval queries t != j of softmax_j(q_t k_j)",
      .family = Family::control,
  };

  Grouping grouping = {};
  Scope scope = Scope::head;
  std::string counts = "none";
  std::uint64_t seed = 0;

  void parameters(Parameters& p) {
    grouping.parameters(p);
    const auto read = p.of_part("allocate");
    p.add<Scope>("scope", scope, scope_words, "whether heads, or layers and heads, compete for the slots");
    const auto normal = [this](std::string_view text) {
      return text == "none" ? "none" : ConfiguredPolicy::parse(text, seed).label_with_seeds();
    };
    p.add("counts", counts, "none | (POLICY)", normal,
          "take granularity and counts, layer by layer and head by head, from this policy's selection");
  }

  void set_seed(std::uint64_t given) { seed = given; }

  std::vector<Source> sources() const {
    return counts == "none" ? std::vector<Source>{} : ConfiguredPolicy::parse(counts).sources();
  }

  void check() const {
    if (counts != "none" && (grouping.heads != Heads::kv || scope != Scope::head))
      throw Error{Refusal::usage, "oracle", "heads and scope come from the counted policy",
                  "counts without heads and scope", "heads or scope beside counts=(" + counts + ")"};
  }

  std::vector<LayerPlan> plans(int layers) const {
    Plan plan{.grouping = grouping, .score = eval_score()};
    if (scope == Scope::layer) plan.allocate = ranked_within_layer();
    if (scope == Scope::global) plan.allocate = ranked_across_layers();
    if (counts == "none") return {{0, layers, plan}};

    check();
    std::vector<LayerPlan> all;
    for (const LayerPlan& counted : ConfiguredPolicy::parse(counts).plans(layers)) {
      if (std::holds_alternative<Everything>(counted.plan.allocate))
        throw Error{Refusal::usage, "oracle:counts", "counts of a policy that keeps everything", "a policy that evicts",
                    counts};
      if (std::holds_alternative<CountsOf>(counted.plan.allocate))
        throw Error{Refusal::usage, "oracle:counts", "counts of counts", "a policy with counts of its own", counts};
      plan.grouping.heads = counted.plan.grouping.heads;
      plan.score.needs = counted.plan.score.needs;
      // Its own queries were asked for with the counted policy; what an oracle reads is the future.
      plan.score.needs.question = plan.score.needs.recent_queries = false;
      plan.score.needs.future_queries = true;
      plan.allocate = CountsOf{counts, has_budget(counted.plan)};
      all.push_back({counted.first, counted.count, plan});
    }
    return all;
  }
};

const Registered<Oracle> registered;

}  // namespace
}  // namespace kvreplay
