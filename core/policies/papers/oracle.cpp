#include <string>

#include "policies/configured.h"
#include "policies/parts/allocation.h"
#include "policies/parts/grouping.h"
#include "policies/parts/top_k.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

const RegisteredPart registered_part{{"eval", PartKind::scorer, "attention of the eval queries themselves"}};

enum class Scope { head, layer, global };

constexpr Choice<Scope> scope_words[] = {{"head", Scope::head}, {"layer", Scope::layer}, {"global", Scope::global}};

struct Oracle {
  static constexpr Card card{
      .name = "oracle",
      .summary = "what the eval queries will attend to: the most recall that any fixed set with its counts can have",
      .paper = "",
      .score = "s[h,j] = sum over eval queries t != j of softmax_j(q_t k_j)",
  };

  Grouping grouping = {};
  Scope scope = Scope::head;
  std::string counts = "none";

  void parameters(Parameters& p) {
    grouping.parameters(p);
    p.add<Scope>("scope", scope, scope_words, "whether heads, or layers and heads, compete for the slots");
    p.add("counts", counts, "none | (POLICY)", normal_counts,
          "take granularity and counts, layer by layer and head by head, from this policy's selection");
  }

  static std::string normal_counts(std::string_view text) {
    if (text == "none") return "none";
    const ConfiguredPolicy counted = ConfiguredPolicy::parse(text);
    const Allocator allocate = counted.plan().allocate;
    if (std::holds_alternative<Everything>(allocate))
      throw Error{Refusal::usage, "oracle:counts", "counts of a policy without a budget", "a policy that evicts",
                  std::string(text)};
    if (std::holds_alternative<CountsOf>(allocate))
      throw Error{Refusal::usage, "oracle:counts", "counts of counts", "a policy with counts of its own",
                  std::string(text)};
    return counted.label();
  }

  Plan plan() const {
    Plan plan{
        .heads = grouping.heads,
        .needs = future_queries(),
        .score = [grouping = grouping](const LayerView& view) { return grouping(view.eval_attention(), view.group()); },
    };
    if (scope == Scope::layer) plan.allocate = ranked_within_layer();
    if (scope == Scope::global) plan.allocate = ranked_across_layers();
    if (counts == "none") return plan;

    if (grouping.heads != Heads::kv || scope != Scope::head)
      throw Error{Refusal::usage, "oracle", "heads and scope come from the counted policy",
                  "counts without heads and scope", "heads or scope beside counts=(" + counts + ")"};
    const Plan counted = ConfiguredPolicy::parse(counts).plan();
    plan.heads = counted.heads;
    plan.needs.last_queries = counted.needs.last_queries;
    plan.needs.all_queries = counted.needs.all_queries;
    plan.score = [own = Grouping{counted.heads, grouping.aggregate}](const LayerView& view) {
      return own(view.eval_attention(), view.group());
    };
    plan.allocate = CountsOf{counts};
    return plan;
  }
};

const Registered<Oracle> registered;

}  // namespace
}  // namespace kvreplay
