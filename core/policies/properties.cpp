#include "policies/properties.h"

#include <utility>

#include "error.h"
#include "policies/plan.h"

namespace kvreplay {
namespace {

std::string in_place_of(bool is_provided, std::string other) { return is_provided ? "" : std::move(other); }

bool scores_what_is_held(const Scorer& score) {
  return !score.accumulates && !score.needs.future_queries && !score.of_prompt;
}

}  // namespace

std::string lacks(const Plan& plan, Property property) {
  switch (property) {
    case Property::scored:
      return in_place_of(plan.score || plan.protect.is_all(), "none");
    case Property::has_score:
      return in_place_of(static_cast<bool>(plan.score), "no score");
    case Property::unscored:
      return in_place_of(!plan.score, "a score");
    case Property::scores_what_is_held:
      return in_place_of(scores_what_is_held(plan.score), "a score over all tokens");
    case Property::attention_by_query:
      return in_place_of(plan.score.online != OnlineScore::none || (!plan.score && plan.protect.is_all()),
                         plan.score ? "another score" : "no score");
    case Property::reads_scores:
      return in_place_of(plan.select.reads_scores, "a selector without scores");
    case Property::best_tokens:
      return in_place_of(plan.select.takes_best, "another selector");
    case Property::fills_budget:
      return in_place_of(plan.select.fills, "a selector that may keep fewer tokens");
    case Property::all_protected:
      return in_place_of(plan.protect.is_all(), "another policy");
    case Property::uniform:
      return in_place_of(plan.allocate->is_uniform, plan.allocate->name);
    case Property::every_token:
      return in_place_of(plan.allocate->keeps_everything, plan.allocate->name);
    case Property::counts_from_depth:
      return in_place_of(plan.allocate->is_by_layer, plan.allocate->name);
    case Property::counts_with_layer:
      return in_place_of(plan.allocate->from != CountsFrom::all_layers, plan.allocate->name);
    case Property::own_set_in_each_layer:
      return in_place_of(!plan.share.shares(), "layers that share a set");
    case Property::not_nested:
      return in_place_of(plan.nesting == Nesting::none, "a policy with nested layers");
    case Property::one_set_a_layer:
      return in_place_of(plan.grouping.heads == Heads::layer, "a set for each head");
    case Property::sets_of_kv_heads:
      return in_place_of(plan.grouping.heads != Heads::query, "heads=query");
    case Property::group_mean:
      return in_place_of(plan.grouping.heads != Heads::kv || plan.grouping.aggregate == Aggregate::mean,
                         "agg=sum or max");
    case Property::decided_once:
      return plan.schedule->decided() == Decision::during_prefill ? plan.schedule->name() : "";
    case Property::question_spared:
      return plan.schedule->spares_question() ? "" : plan.schedule->name();
    case Property::unchanged:
      return in_place_of(!plan.store->moves_tokens && !plan.store->changes_tokens(), "another store");
    case Property::scored_in_place:
      return in_place_of(!plan.store->moves_tokens || !plan.score, "another store");
    case Property::cache_positions:
      return in_place_of(plan.store->moves_tokens, "tokens at their original positions");
  }
  return "";
}

void require(const std::string& who, const Plan& plan, const Requirements& required) {
  for (const auto& [property, reason, remedy] : required)
    if (const std::string found = lacks(plan, property); !found.empty())
      throw Error{Refusal::usage, who, reason, remedy, found};
}

}  // namespace kvreplay
