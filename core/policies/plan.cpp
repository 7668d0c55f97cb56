#include "policies/plan.h"

#include <algorithm>

#include "error.h"

namespace kvreplay {
namespace {

constexpr const char* once_remedy = "schedule=once";

/// Of what is chosen by scores, or protected.
Requirements required_by_choice(const Plan& plan) {
  Requirements all;
  if (plan.allocate->keeps_everything) return all;
  if (plan.select.reads_scores)
    all.push_back({Property::scored, "the selector reads scores", "a score, as in score=window"});
  if (plan.protect.is_all()) {
    constexpr const char* reason = "all of the budget stays by rule";
    constexpr const char* remedy = "another policy for this part";
    all.push_back({Property::reads_scores, reason, remedy});
    if (!plan.score) all.push_back({Property::uniform, reason, remedy});
  }
  return all;
}

Requirements required_by(Nesting nesting) {
  if (nesting == Nesting::none) return {};
  return {{Property::counts_from_depth, "nested sets need counts that are known beforehand",
           "allocate=decay or allocate=pyramid"},
          {Property::one_set_a_layer, "nested sets are one a layer", "heads=layer"},
          {Property::scores_what_is_held, "nested sets are scored over what the layer before kept",
           "score=recency-window, window or random"},
          {Property::decided_once, "nested sets are made at the end of the prompt", once_remedy}};
}

/// Where the observation window ends, and which tokens are protected.
Requirements required_at_end(const Plan& plan) {
  Requirements all;
  if (plan.window_at == WindowAt::question)
    all.push_back({Property::decided_once, "window_at=question needs the whole prompt", once_remedy});
  if (plan.protect.question.last_tokens > 0)
    all.push_back(
        {Property::decided_once, "the question that stays is known when the prompt has been seen", once_remedy});
  return all;
}

}  // namespace

Requirements Scorer::required() const {
  Requirements all;
  if (!score) return all;
  all.push_back({Property::reads_scores, "nothing reads the score", "select=top-k or select=chunks"});
  if (of_prompt) all.push_back({Property::decided_once, "the score is one of the whole prompt", once_remedy});
  if (needs.future_queries)
    all.push_back({Property::decided_once, "future queries are known for one moment", once_remedy});
  if (needs.question)
    all.push_back(
        {Property::question_spared, "score=question asks a question that must stay whole", "schedule=question-blocks"});
  return all;
}

Requirements Selector::required() const {
  Requirements all;
  if (one_set)
    all.push_back({Property::one_set_a_layer, "similarity is that of all heads of a token together", "heads=layer"});
  if (reads_layer)
    all.push_back({Property::counts_with_layer,
                   "the selector reads the layer, and the allocator decides when all layers have been seen",
                   "an allocator of one layer"});
  if (of_prompt) {
    constexpr const char* reason = "the selector chooses from the whole prompt";
    all.push_back({Property::decided_once, reason, once_remedy});
    all.push_back({Property::not_nested, reason, "a policy whose layers are not nested"});
  }
  return all;
}

bool Sharing::is_source(int layer, int layers) const {
  for (int l = 0; l < layers; ++l)
    if (source(l, layers) == layer) return true;
  return false;
}

Needs needs_of(const Plan& plan) {
  Needs needs = plan.score.needs;
  const Needs of_store = plan.store->needs;
  needs.last_queries = std::max(needs.last_queries, of_store.last_queries);
  needs.all_queries |= of_store.all_queries;
  return needs;
}

bool has_budget(const Plan& plan) {
  if (plan.allocate->other != nullptr && !plan.allocate->changes_sets()) return plan.allocate->other_has_budget;
  return !plan.own_memory && !plan.allocate->keeps_everything && plan.schedule->has_budget() &&
         plan.nesting != Nesting::prunes_next;
}

bool have_budget(std::span<const LayerPlan> plans) { return std::ranges::all_of(plans, has_budget, &LayerPlan::plan); }

bool keeps_everything(const Plan& plan, int budget, int prompt) {
  return plan.allocate->keeps_everything || (has_budget(plan) && budget >= prompt);
}

Decision decision_of(const Plan& plan) {
  if (plan.score.needs.future_queries) return Decision::future;
  const Decision decided = plan.schedule->decided();
  if (decided != Decision::after_prefill) return decided;
  if (plan.nesting != Nesting::none) return Decision::during_prefill;
  return plan.allocate->keeps_everything ? Decision::never : Decision::after_prefill;
}

std::string lacks_protection(const Plan& plan) {
  if (plan.allocate->keeps_everything) return "keeps every token";
  if (plan.allocate->changes_sets()) return "keeps the protected tokens of another policy";
  if (plan.score.needs.future_queries) return "bounds what other policies keep";
  if (plan.protect.is_all() || (!plan.score && !plan.select.one_set)) return "keeps tokens without a score";
  if (plan.own_memory || plan.nesting == Nesting::prunes_next) return "ignores the budget";
  return "";
}

std::string why_no_twin(const Plan& plan) {
  const Decision decided = plan.schedule->decided();
  if (decided == Decision::never) return "each query reads a set of its own";
  if (plan.allocate->keeps_everything) return "keeps every token";
  if (plan.allocate->other != nullptr) return "depends on the kept set of another policy";
  if (decided == Decision::during_prefill) return "its kept set is dynamic";
  if (!has_budget(plan)) return "ignores the budget";
  return "";
}

void check_plan(const std::string& who, const Plan& plan) {
  // The plan of the policy whose sets it takes was checked, and takes no other part.
  if (plan.allocate->changes_sets()) return;
  for (const Requirements& of_part :
       {required_by_choice(plan), plan.allocate->required, plan.score.required(), plan.select.required(),
        required_by(plan.nesting), required_at_end(plan), plan.schedule->required(), plan.store->required})
    require(who, plan, of_part);
}

void check_layers_apart(const std::string& who, const Plan& plan) {
  if (!has_budget(plan)) throw Error{Refusal::usage, who, "no budget binds it", "a policy that one binds"};
  constexpr const char* reason = "its layers depend on each other";
  Requirements all{{Property::not_nested, reason, "a policy whose layers are not nested"},
                   {Property::own_set_in_each_layer, reason, "share=none"}};
  if (plan.allocate->other != nullptr || plan.allocate->from != CountsFrom::layer)
    all.push_back({Property::uniform, reason, "allocate=uniform"});
  require(who, plan, all);
}

}  // namespace kvreplay
