#include "policy_facts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "error.h"

namespace kvreplay {
namespace {

constexpr int some_layers = 8;

using Texts = std::vector<std::string>;

void add_once(Texts& texts, const std::string& text) {
  if (!text.empty() && std::ranges::find(texts, text) == texts.end()) texts.push_back(text);
}

std::string joined(const Texts& texts, std::string_view separator, std::string_view empty) {
  return texts.empty() ? std::string(empty) : fmt::format("{}", fmt::join(texts, separator));
}

bool reads_sparsely(const Plan& plan) { return plan.schedule->decided() == Decision::never; }

bool has_one_source(const LayerPlan& range) {
  const int source = range.source_of(range.first);
  for (int layer = range.first; layer < range.end(); ++layer)
    if (range.source_of(layer) != source) return false;
  return range.count > 1;
}

bool reuses_sets(const LayerPlan& range) {
  for (int layer = range.first; layer < range.end(); ++layer)
    if (range.source_of(layer) != layer) return true;
  return false;
}

std::string granularity_of_reads(ScoredUnit unit) {
  switch (unit) {
    case ScoredUnit::none:
      return "per query";
    case ScoredUnit::token:
      return "token, per query and query head";
    case ScoredUnit::page:
      return "page, per query and query head";
  }
  return "";
}

std::string cost_of_reads(ScoredUnit unit) {
  switch (unit) {
    case ScoredUnit::none:
      return "none";
    case ScoredUnit::token:
      return "O(n) per query";
    case ScoredUnit::page:
      return "O(n / page) per query";
  }
  return "";
}

std::string granularity_of(const LayerPlan& range) {
  const Plan& plan = range.plan;
  if (reads_sparsely(plan)) return granularity_of_reads(plan.schedule->scored_unit());
  if (plan.allocate->keeps_everything) return "all tokens";
  const std::string unit = plan.select.best ? "chunk" : "token";
  if (has_one_source(range)) return unit + ", one set for all layers";
  const char* const rows = plan.grouping.heads == Heads::kv      ? ", per KV head"
                           : plan.grouping.heads == Heads::query ? ", per query head"
                                                                 : ", per layer";
  return unit + rows + (reuses_sets(range) ? ", shared by adjacent layers" : "");
}

void add_needs(Texts& texts, const ConfiguredPolicy& policy, const Plan& plan) {
  const Needs needs = needs_of(plan);
  if (needs.future_queries) add_once(texts, "eval queries");
  if (needs.all_queries)
    add_once(texts, plan.schedule->goes_on_after_prompt() ? "all queries" : "all prompt queries");
  else if (needs.last_queries > 0)
    add_once(texts, needs.last_queries == 1 ? "last query" : fmt::format("last {} queries", needs.last_queries));
  if (needs.recent_queries)
    add_once(texts, plan.protect.question.last_tokens > 0 ? "queries of the question" : "queries of the recent window");
  if (needs.question) add_once(texts, "queries of the question");
  if (reads_sparsely(plan)) add_once(texts, "each reading query");
  if (needs.rope) add_once(texts, "RoPE");
  if (needs.projection) add_once(texts, "W_o");
  if (needs.reconstruction) add_once(texts, "passes that repeat the prompt");
  const Parameters parameters = policy.parameters();
  for (const Parameter& parameter : parameters.all())
    if (parameter.range.find("FILE.npy") != std::string::npos)
      add_once(texts,
               fmt::format("{} ({}=)", parameter.default_text == "none" ? "file" : "optional file", parameter.name));
}

/// Cost of scoring, per layer and head: n prompt tokens, w scoring queries, B the budget. Selection sorts n scores
/// besides.
std::string cost_of(const LayerPlan& range) {
  const Plan& plan = range.plan;
  if (reads_sparsely(plan)) return cost_of_reads(plan.schedule->scored_unit());
  const Needs needs = needs_of(plan);
  const bool reads_window = needs.recent_queries || needs.question || needs.last_queries > 0;
  if (needs.future_queries) return "O(m n)";
  if (plan.schedule->is_online() && (plan.score || plan.store->changes_tokens())) return "O(n B)";
  if (plan.score.accumulates || plan.score.quadratic || plan.store->needs.all_queries) return "O(n^2)";
  if (plan.select.one_set) return has_one_source(range) ? "O(n B), in one layer" : "O(n B)";
  if (reads_window && !plan.score) return "O(w + n)";  // a store reads the queries and the keys apart
  if (reads_window) return plan.schedule->decided() == Decision::during_prefill ? "O(w B) per eviction" : "O(w n)";
  if (plan.score || plan.store->changes_tokens()) return "O(n)";
  return "none";
}

std::string decided_by(const Plan& plan) {
  switch (decision_of(plan)) {
    case Decision::after_prefill:
      return "one-shot, after prefill";
    case Decision::during_prefill:
      if (plan.schedule->goes_on_after_prompt()) return "online";
      return plan.nesting == Nesting::none ? "during prefill" : "during prefill, nested layers";
    case Decision::future:
      return "oracle";
    case Decision::never:
      if (reads_sparsely(plan)) return "sparse reads, nothing evicted";
      return plan.store->changes_tokens() ? "changed cache, nothing evicted" : "nothing evicted";
  }
  return "";
}

std::string allocation_of(const Plan& plan) {
  const Allocator& allocator = *plan.allocate;
  if (allocator.keeps_everything || allocator.is_uniform) return "";
  if (allocator.from == CountsFrom::all_layers) return "budgets from the scores of all layers";
  if (allocator.from == CountsFrom::layer) return "budgets from the scores of a layer";
  return allocator.is_by_layer ? "fixed per-layer budgets" : "fixed per-head budgets";
}

void add_types(Texts& texts, const Plan& plan) {
  add_once(texts, decided_by(plan));
  if (plan.allocate->keeps_everything) return;
  if (has_budget(plan))
    add_once(texts, allocation_of(plan));
  else
    add_once(texts, "budget-free");
  if (plan.store->changes_tokens()) add_once(texts, "changed cache");
}

}  // namespace

PolicyFacts facts_of(const ConfiguredPolicy& policy) {
  std::vector<LayerPlan> plans;
  try {
    plans = policy.plans(some_layers);
  } catch (const Error&) {
    // Its plans are those of the policy in a parameter that has no default.
    const std::string of_other = "as the other policy";
    return {.granularity = of_other, .needs = "another policy", .type = of_other, .cost = of_other};
  }
  Texts granularities, needs, types, costs;
  for (const LayerPlan& range : plans) {
    // The dense layers of a policy with sparse reads add no fact.
    if (plans.size() > 1 && range.plan.allocate->keeps_everything && !reads_sparsely(range.plan)) continue;
    add_once(granularities, granularity_of(range));
    add_needs(needs, policy, range.plan);
    add_types(types, range.plan);
    add_once(costs, cost_of(range));
  }
  // The plans of user-defined policies need not declare the queries that they read.
  const bool is_declared = policy.card().family != Family::own;
  return {.granularity = joined(granularities, "; ", "-"),
          .needs = joined(needs, ", ", is_declared ? "none" : "not declared"),
          .type = joined(types, "; ", "-"),
          .cost = is_declared ? joined(costs, "; ", "none") : "not declared"};
}

}  // namespace kvreplay
