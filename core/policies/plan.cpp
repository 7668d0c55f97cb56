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
    constexpr const char* reason = "protected tokens fill the whole budget";
    constexpr const char* remedy = "another policy for this part";
    all.push_back({Property::reads_scores, reason, remedy});
    if (!plan.score) all.push_back({Property::uniform, reason, remedy});
  }
  return all;
}

Requirements required_by(Nesting nesting) {
  if (nesting == Nesting::none) return {};
  return {{Property::counts_from_depth, "nested sets need token counts that do not depend on scores",
           "allocate=decay or allocate=pyramid"},
          {Property::one_set_a_layer, "nested sets need one set per layer", "heads=layer"},
          {Property::scores_what_is_held, "nested sets need a score over the tokens kept by the previous layer",
           "score=recency-window, window or random"},
          {Property::decided_once, "nested sets are selected at the end of the prompt", once_remedy}};
}

/// Where the observation window ends, and which tokens are protected.
Requirements required_at_end(const Plan& plan) {
  Requirements all;
  if (plan.window_at == WindowAt::question)
    all.push_back({Property::decided_once, "window_at=question needs the whole prompt", once_remedy});
  if (plan.protect.question.last_tokens > 0)
    all.push_back({Property::decided_once, "a protected question is known only after the whole prompt", once_remedy});
  return all;
}

}  // namespace

Requirements Scorer::required() const {
  Requirements all;
  if (!score) return all;
  all.push_back({Property::reads_scores, "unused score: the selector reads none", "select=top-k or select=chunks"});
  if (of_prompt)
    all.push_back({Property::decided_once, "the score is computed once over the whole prompt", once_remedy});
  if (needs.future_queries)
    all.push_back({Property::decided_once, "a score from future queries is available only at the end of the prompt",
                   once_remedy});
  if (needs.question)
    all.push_back(
        {Property::question_spared, "score=question needs a question that is not evicted", "schedule=question-blocks"});
  return all;
}

Requirements Selector::required() const {
  Requirements all;
  if (one_set)
    all.push_back({Property::one_set_a_layer, "the similarity of tokens covers all heads together", "heads=layer"});
  if (reads_layer)
    all.push_back({Property::counts_with_layer,
                   "the selector runs layer by layer, but the allocator needs the scores of all layers",
                   "an allocator that works layer by layer"});
  if (of_prompt) {
    constexpr const char* reason = "the selector reads the whole prompt";
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

Requirements Sharing::required() const {
  if (!pools()) return {};
  return {{Property::has_score, "share=pooled needs a score", "a score, as in score=window"},
          {Property::reads_scores, "share=pooled needs a selector that reads scores", "select=top-k or select=chunks"},
          {Property::decided_once, "scores of all layers are known only after the whole prompt", once_remedy},
          {Property::uniform, "one set for all layers has one number of tokens", "allocate=uniform"},
          {Property::not_nested, "one set for all layers", "a policy whose layers are not nested"}};
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
  if (plan.score.needs.future_queries) return "is a bound for other policies";
  if (plan.protect.is_all() || (!plan.score && !plan.select.one_set)) return "keeps tokens without a score";
  if (plan.own_memory || plan.nesting == Nesting::prunes_next) return "ignores the budget";
  return "";
}

std::string why_no_twin(const Plan& plan) {
  const Decision decided = plan.schedule->decided();
  if (decided == Decision::never) return "reads a different set for each query";
  if (plan.allocate->keeps_everything) return "keeps every token";
  if (plan.allocate->other != nullptr) return "depends on the kept set of another policy";
  if (decided == Decision::during_prefill) return "has a dynamic kept set";
  if (!has_budget(plan)) return "ignores the budget";
  return "";
}

void check_plan(const std::string& who, const Plan& plan) {
  // The plan of the policy whose sets it takes was checked, and takes no other part.
  if (plan.allocate->changes_sets()) return;
  for (const Requirements& of_part : {required_by_choice(plan), plan.allocate->required, plan.score.required(),
                                      plan.select.required(), plan.share.required(), required_by(plan.nesting),
                                      required_at_end(plan), plan.schedule->required(), plan.store->required})
    require(who, plan, of_part);
}

void check_layers_apart(const std::string& who, const Plan& plan) {
  if (!has_budget(plan)) throw Error{Refusal::usage, who, "the policy ignores the budget", "a policy with a budget"};
  constexpr const char* reason = "its layers depend on each other";
  Requirements all{{Property::not_nested, reason, "a policy whose layers are not nested"},
                   {Property::own_set_in_each_layer, reason, "share=none"}};
  if (plan.allocate->other != nullptr || plan.allocate->from != CountsFrom::layer)
    all.push_back({Property::uniform, reason, "allocate=uniform"});
  require(who, plan, all);
}

}  // namespace kvreplay
