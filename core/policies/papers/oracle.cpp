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

/// What an oracle with another policy's counts may choose, each more than the one before: whole chunks where that
/// policy keeps such, with what it keeps by rule; any tokens; also the counts of a layer's heads; also those of layers.
enum class Free { chunks, tokens, heads, layers };

constexpr Choice<Free> free_words[] = {
    {"chunks", Free::chunks}, {"tokens", Free::tokens}, {"heads", Free::heads}, {"layers", Free::layers}};

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
  InnerPolicy counts = {};
  Free free = Free::tokens;
  std::uint64_t seed = 0;

  void parameters(Parameters& p) {
    grouping.parameters(p);
    const auto read = p.of_part("allocate");
    p.add<Scope>("scope", scope, scope_words, "whether heads, or layers and heads, compete for the slots");
    const auto set = [this](std::string_view text) { return counts.set(text, seed); };
    p.add("counts", counts.text, "none | (POLICY)", set,
          "take granularity and counts, layer by layer and head by head, from this policy's selection");
    p.add<Free>(
        "free", free, free_words,
        "with counts: which whole chunks stay, if the policy keeps such; or any tokens; also how many of each head "
        "of a layer; also of each layer");
  }

  void set_seed(std::uint64_t given) { seed = given; }

  std::vector<Source> sources() const { return counts.sources(); }

  void check() const {
    if (counts && (grouping.heads != Heads::kv || scope != Scope::head))
      throw Error{Refusal::usage, "oracle", "heads and scope come from the counted policy",
                  "counts without heads and scope", "heads or scope beside counts=(" + counts.text + ")"};
    if (!counts && free != Free::tokens)
      throw Error{Refusal::usage, "oracle:free", "no counts to be free of", "counts=(POLICY)", "counts=none"};
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
      // Its own queries were asked for with the counted policy; what an oracle reads is the future.
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
    refuse_if(counted.allocate->keeps_everything, "oracle:counts", "counts of a policy that keeps everything",
              "a policy that evicts");
    refuse_if(counted.allocate->other != nullptr, "oracle:counts", "counts of counts",
              "a policy with counts of its own");
    if (free == Free::tokens) return;
    refuse_if(counted.schedule->decided() != Decision::after_prefill, "oracle:free",
              "its sets change with time, and no fixed set bounds them", "a policy that decides once");
    refuse_if(!has_budget(counted), "oracle:free", "no budget binds it", "a policy that one binds");
  }

  /// One plan for all layers: their rows are ranked as one.
  std::vector<LayerPlan> together(std::vector<LayerPlan> all, int layers) const {
    LayerPlan whole{0, layers, std::move(all.front().plan)};
    for (const LayerPlan& one : std::span(all).subspan(1)) {
      if (one.plan.grouping.heads != whole.plan.grouping.heads)
        throw Error{Refusal::usage, "oracle:free", "a token of one layer takes more slots than one of another",
                    "a policy of one granularity in all layers", counts.text};
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
