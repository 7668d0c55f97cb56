#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "policies/allocators/allocation.h"
#include "policies/policy.h"
#include "policies/scores/attention_scores.h"
#include "policies/text/configured.h"
#include "policies/text/inner_policy.h"

namespace kvreplay {
namespace {

enum class Scope { head, layer, global };

constexpr Choice<Scope> scope_words[] = {{"head", Scope::head}, {"layer", Scope::layer}, {"global", Scope::global}};

/// The free choices of an oracle with another policy's counts, each including the ones before: whole chunks (if that
/// policy keeps chunks) beside its protected tokens; any tokens; also the counts of a layer's heads; also the counts of
/// the layers.
enum class Free { chunks, tokens, heads, layers };

constexpr Choice<Free> free_words[] = {
    {"chunks", Free::chunks}, {"tokens", Free::tokens}, {"heads", Free::heads}, {"layers", Free::layers}};

struct Oracle {
  static constexpr Card card{
      .name = "oracle",
      .summary =
          "Oracle bound: attention of the eval queries themselves; no static set with the same token counts has a "
          "higher attention recall",
      .paper = "",
      .score = "s[h,j] = sum over eval queries t != j of softmax_j(q_t k_j)",
      .family = Family::control,
  };

  Grouping grouping = {};
  Scope scope = Scope::head;
  InnerPolicy counts = {};
  Free free = Free::tokens;
  std::uint64_t seed = 0;

  void parameters(Parameters& p) {
    grouping.parameters(p);
    const auto read = p.of_part("allocate");
    p.add<Scope>("scope", scope, scope_words,
                 "competition for slots: within each head, among the heads of a layer, or among all layers and heads");
    const auto set = [this](std::string_view text) { return counts.set(text, seed); };
    p.add("counts", counts.text, "none | (POLICY)", set,
          "policy whose granularity and token counts per layer and head are used");
    p.add<Free>(
        "free", free, free_words,
        "with counts, what the oracle chooses: chunks (if the policy keeps chunks); tokens; also the counts of the "
        "heads of a layer; or also the counts of the layers");
  }

  void set_seed(std::uint64_t given) { seed = given; }

  std::vector<Source> sources() const { return counts.sources(); }

  void check() const {
    if (counts && (grouping.heads != Heads::kv || scope != Scope::head))
      throw Error{Refusal::usage, "oracle", "heads and scope are those of the policy in counts",
                  "counts without heads and scope", "heads or scope beside counts=(" + counts.text + ")"};
    if (!counts && free != Free::tokens)
      throw Error{Refusal::usage, "oracle:free", "free requires counts", "counts=(POLICY)", "counts=none"};
  }

  std::vector<LayerPlan> plans(int layers) const {
    Plan plan{.grouping = grouping, .score = eval_score()};
    if (scope == Scope::layer) plan.allocate = within_layer(ranked_within_layer);
    if (scope == Scope::global) plan.allocate = across_layers(ranked_across_layers);
    check();
    if (!counts) return {{0, layers, plan}};

    std::vector<LayerPlan> all;
    const std::vector<LayerPlan> of_counted = counts->plans(layers);
    for (const LayerPlan& counted : of_counted) {
      check_counted(counted.plan);
      plan.grouping.heads = counted.plan.grouping.heads;
      plan.score.needs = counted.plan.score.needs;
      // The needs of the counted policy already include its own queries; the oracle reads future queries besides.
      plan.score.needs.question = plan.score.needs.recent_queries = false;
      plan.score.needs.future_queries = true;
      plan.allocate =
          counts_of(counts.policy, has_budget(counted.plan),
                    free == Free::heads || free == Free::layers ? SlotDivision(ranked_slots) : SlotDivision{},
                    free == Free::layers);
      plan.protect = {};
      plan.select = top_k();
      if (free == Free::chunks && counted.plan.select.best) {
        plan.protect = counted.plan.protect;
        plan.select = {.select = counted.plan.select.best};
      }
      all.push_back({counted.first, counted.count, plan});
    }
    return free == Free::layers ? together(std::move(all), layers) : all;
  }

 private:
  void check_counted(const Plan& counted) const {
    const auto refuse_if = [this](bool unfit, const char* where, const char* what, const char* expected) {
      if (unfit) throw Error{Refusal::usage, where, what, expected, counts.text};
    };
    refuse_if(counted.allocate->keeps_everything, "oracle:counts", "the policy keeps every token",
              "a policy that evicts");
    refuse_if(counted.allocate->other != nullptr, "oracle:counts",
              "the policy takes its own counts from another policy",
              "a policy that does not use another policy's counts");
    if (free == Free::tokens) return;
    refuse_if(counted.schedule->decided() != Decision::after_prefill, "oracle:free",
              "the policy's sets are dynamic; a static set is no bound for them", "a one-shot policy");
    refuse_if(!has_budget(counted), "oracle:free", "the policy ignores the budget", "a policy with a budget");
  }

  /// One plan for all layers, so that the rows of all layers are ranked together.
  std::vector<LayerPlan> together(std::vector<LayerPlan> all, int layers) const {
    LayerPlan whole{0, layers, std::move(all.front().plan)};
    for (const LayerPlan& one : std::span(all).subspan(1)) {
      if (one.plan.grouping.heads != whole.plan.grouping.heads)
        throw Error{Refusal::usage, "oracle:free", "layers differ in granularity",
                    "a policy with one granularity in all layers", counts.text};
      Needs& needs = whole.plan.score.needs;
      needs.last_queries = std::max(needs.last_queries, one.plan.score.needs.last_queries);
      needs.all_queries = needs.all_queries || one.plan.score.needs.all_queries;
    }
    return {std::move(whole)};
  }
};

const Registered<Oracle> registered;

}  // namespace
}  // namespace kvreplay
