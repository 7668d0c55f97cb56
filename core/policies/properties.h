// What parts of a plan provide to each other and require of each other: that is all that decides which of them fit.
#pragma once

#include <string>
#include <vector>

namespace kvreplay {

struct Plan;

/// Each is provided by one member of the plan.
enum class Property {
  scored,                 // score: there is one, or all of the budget is protected
  has_score,              // score
  unscored,               // score: there is none
  scores_what_is_held,    // score: whatever is resident
  attention_by_query,     // score: each next query adds to it, or replaces it; or all of the budget is protected
  reads_scores,           // select
  best_tokens,            // select: no others
  fills_budget,           // select: exactly
  all_protected,          // protect: all of the budget
  uniform,                // allocate: every layer and head has B
  every_token,            // allocate: stays
  counts_from_depth,      // allocate: known beforehand, layer by layer
  counts_with_layer,      // allocate: known when the layer has been scored
  own_set_in_each_layer,  // share
  not_nested,             // nesting
  one_set_a_layer,        // grouping
  sets_of_kv_heads,       // grouping: or of layers
  group_mean,             // grouping: of a group's query heads, where a KV head has a set
  decided_once,           // schedule: for good
  question_spared,        // schedule: the question that ends the prompt
  unchanged,              // store: keys and values are as they were, where they were
  scored_in_place,        // store: tokens do not move, or there is no score
  cache_positions         // store: tokens move to their slots
};

struct Requirement {
  Property property;
  const char* reason;  // why the part requires it
  const char* remedy;  // what provides it, as a user asks for it
};

using Requirements = std::vector<Requirement>;

/// What the plan has in the place of the property, as "another selector"; empty: it has the property.
std::string lacks(const Plan& plan, Property property);

/// Throws Error{usage} at `who` where the plan does not provide one of them.
void require(const std::string& who, const Plan& plan, const Requirements& required);

}  // namespace kvreplay
