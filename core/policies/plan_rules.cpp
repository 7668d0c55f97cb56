// Which parts fit together, and why others do not.
#include <algorithm>

#include "policies/policy.h"

namespace kvreplay {

namespace {

const char* name_of(const Allocator& allocator) {
  constexpr const char* names[] = {"uniform",
                                   "all tokens",
                                   "counts from the number of layers",
                                   "counts from the number of layers and heads",
                                   "counts from a layer's scores",
                                   "counts from all layers' scores",
                                   "another policy's counts",
                                   "another policy's kept sets"};
  return names[allocator.index()];
}

/// As it is asked for.
std::string name_of(const Schedule& schedule) {
  if (std::holds_alternative<Reads>(schedule)) return "queries that each read some tokens";
  constexpr std::string_view names[] = {"once", "", "threshold", "online", "rolling"};
  const auto* blocks = std::get_if<Blocks>(&schedule);
  return "schedule=" + std::string(blocks != nullptr ? blocks->name : names[schedule.index()]);
}

bool keeps_all_by_rule(const Protection& protect) {
  return protect.recent.is_fraction() && protect.recent.share == 1.0;
}

bool shares_layers(const Sharing& share) {
  constexpr int some_layers = 64;
  for (int layer = 0; layer < some_layers; ++layer)
    if (share(layer, some_layers) != layer) return true;
  return false;
}

}  // namespace

const std::string* policy_taken_from(const Allocator& allocate) {
  if (const auto* counts = std::get_if<CountsOf>(&allocate)) return &counts->policy;
  if (const auto* sets = std::get_if<SetsOf>(&allocate)) return &sets->policy;
  return nullptr;
}

Needs needs_of(const Store& store) {
  const auto* transformed = std::get_if<Transformed>(&store);
  return transformed != nullptr ? transformed->needs : Needs{};
}

Needs needs_of(const Plan& plan) {
  Needs needs = plan.score.needs;
  const Needs of_store = needs_of(plan.store);
  needs.last_queries = std::max(needs.last_queries, of_store.last_queries);
  needs.all_queries |= of_store.all_queries;
  return needs;
}

bool has_budget(const Plan& plan) {
  if (const auto* counts = std::get_if<CountsOf>(&plan.allocate)) return counts->has_budget;
  return !plan.own_memory && !std::holds_alternative<Everything>(plan.allocate) &&
         !std::holds_alternative<Threshold>(plan.schedule) && plan.nesting != Nesting::prunes_next;
}

bool keeps_everything(const Plan& plan, int budget, int prompt) {
  return std::holds_alternative<Everything>(plan.allocate) || (has_budget(plan) && budget >= prompt);
}

Decision decision_of(const Plan& plan) {
  if (plan.score.needs.future_queries) return Decision::future;
  if (std::holds_alternative<Reads>(plan.schedule)) return Decision::never;
  if (!std::holds_alternative<Once>(plan.schedule) || plan.nesting != Nesting::none) return Decision::during_prefill;
  return std::holds_alternative<Everything>(plan.allocate) ? Decision::never : Decision::after_prefill;
}

std::string lacks_protection(const Plan& plan) {
  if (std::holds_alternative<Everything>(plan.allocate)) return "keeps every token";
  if (std::holds_alternative<SetsOf>(plan.allocate)) return "keeps the protected tokens of another policy";
  if (plan.score.needs.future_queries) return "bounds what other policies keep";
  if (keeps_all_by_rule(plan.protect) || (!plan.score && !plan.select.one_set)) return "keeps tokens without a score";
  if (plan.own_memory || plan.nesting == Nesting::prunes_next) return "ignores the budget";
  return "";
}

std::string why_no_twin(const Plan& plan) {
  if (std::holds_alternative<Reads>(plan.schedule)) return "each query reads a set of its own";
  if (std::holds_alternative<Everything>(plan.allocate)) return "keeps every token";
  if (policy_taken_from(plan.allocate) != nullptr) return "depends on the kept set of another policy";
  if (!std::holds_alternative<Once>(plan.schedule)) return "its kept set is dynamic";
  if (!has_budget(plan)) return "ignores the budget";
  return "";
}

void check_plan(const std::string& who, const Plan& plan) {
  // The plan of the policy whose sets it takes was checked, and takes no other part.
  if (std::holds_alternative<SetsOf>(plan.allocate)) return;
  const auto refuse_if = [&who](bool unfit, const char* what, const char* expected, const std::string& found) {
    if (unfit) throw Error{Refusal::usage, who, what, expected, found};
  };
  const bool reads = std::holds_alternative<Reads>(plan.schedule);
  const bool once = std::holds_alternative<Once>(plan.schedule) || reads;
  const bool online = std::holds_alternative<Online>(plan.schedule);
  const bool rolling = std::holds_alternative<Rolling>(plan.schedule);
  const bool uniform = std::holds_alternative<Uniform>(plan.allocate);
  const bool everything = std::holds_alternative<Everything>(plan.allocate);
  const bool by_layer = std::holds_alternative<ByLayer>(plan.allocate);
  const bool by_head = std::holds_alternative<ByHead>(plan.allocate);
  const bool across = std::holds_alternative<AcrossLayers>(plan.allocate);
  const bool by_rule = keeps_all_by_rule(plan.protect);

  const char* const allocator = name_of(plan.allocate);
  const std::string schedule = name_of(plan.schedule);

  refuse_if(!everything && plan.select.reads_scores && !plan.score && !by_rule, "the selector reads scores",
            "a score, as in score=window", "none");
  refuse_if(plan.score && !plan.select.reads_scores, "nothing reads the score", "select=top-k or select=chunks",
            "a selector without scores");
  refuse_if(everything && (plan.score || !plan.select.takes_best), "every token stays", "no score and no selector",
            plan.score ? "a score" : "a selector");
  refuse_if(by_rule && (!plan.select.reads_scores || (!uniform && !plan.score)), "all of the budget stays by rule",
            "another policy for this part", plan.select.reads_scores ? allocator : "a selector");
  const bool from_scores =
      std::holds_alternative<WithinLayer>(plan.allocate) || across || std::holds_alternative<CountsOf>(plan.allocate);
  refuse_if(!plan.score && from_scores, "the allocator divides what is scored", "a score, or allocate=uniform",
            allocator);
  refuse_if((by_layer || by_head || across) && shares_layers(plan.share), "layers that share a set have one count",
            "share=none, or allocate=uniform", allocator);
  refuse_if(plan.select.one_set && plan.grouping.heads != Heads::layer,
            "similarity is that of all heads of a token together", "heads=layer", "a set for each head");
  refuse_if(plan.select.reads_layer && across,
            "the selector reads the layer, and the allocator decides when all layers have been seen",
            "an allocator of one layer", allocator);
  refuse_if(plan.nesting != Nesting::none && !by_layer, "nested sets need counts that are known beforehand",
            "allocate=decay or allocate=pyramid", allocator);
  refuse_if(plan.nesting != Nesting::none && plan.grouping.heads != Heads::layer, "nested sets are one a layer",
            "heads=layer", "a set for each head");
  refuse_if(plan.nesting != Nesting::none &&
                (plan.score.accumulates || plan.score.needs.future_queries || plan.score.of_prompt),
            "nested sets are scored over what the layer before kept", "score=recency-window, window or random",
            "a score of all tokens");
  refuse_if(!once && plan.nesting != Nesting::none, "nested sets are made at the end of the prompt", "schedule=once",
            schedule);
  refuse_if(!once && plan.score.of_prompt, "the score is one of the whole prompt", "schedule=once", schedule);
  refuse_if(!once && !plan.select.fills, "a schedule holds equally many tokens in every head",
            "a selector that fills its budget", "one that may keep fewer");
  refuse_if((online || rolling) && !plan.select.takes_best, "the schedule itself says which token goes", "select=top-k",
            "another selector");
  refuse_if(online && !std::holds_alternative<Exact>(plan.store), "schedule=online scores tokens where they were",
            "store=exact", "another store");
  refuse_if(!once && plan.select.of_prompt, "the selector chooses from the whole prompt", "schedule=once", schedule);
  refuse_if(plan.nesting != Nesting::none && plan.select.of_prompt, "the selector chooses from the whole prompt",
            "a policy whose layers are not nested", "one whose layers are");
  refuse_if(!once && !uniform, "a schedule holds equally many tokens in every layer and head", "allocate=uniform",
            allocator);
  refuse_if(!once && plan.score.needs.future_queries, "future queries are known for one moment", "schedule=once",
            schedule);
  const auto* blocks = std::get_if<Blocks>(&plan.schedule);
  refuse_if(blocks != nullptr && blocks->by_relevance && !plan.score, "slots are in the order of scores",
            "order=position, or a score", "no score");
  refuse_if(blocks != nullptr && blocks->by_relevance && !std::holds_alternative<CachePositions>(plan.store),
            "slots in the order of scores are positions in the cache",
            "store=cache (positions=cache), or order=position", "tokens that stay where they were");
  refuse_if(plan.score.needs.question && !(blocks != nullptr && blocks->spared),
            "score=question asks a question that must stay whole", "schedule=question-blocks", schedule);
  refuse_if(online && plan.grouping.heads == Heads::kv && plan.grouping.aggregate != Aggregate::mean,
            "schedule=online takes the mean over a group of query heads", "agg=mean", "agg=sum or max");
  refuse_if(online && plan.score.online == OnlineScore::none, "schedule=online evicts by attention, query by query",
            "score=cumulative or score=newest", plan.score ? "another score" : "none");
  refuse_if(!once && plan.window_at == WindowAt::question, "window_at=question needs the whole prompt", "schedule=once",
            schedule);
  refuse_if(!once && plan.protect.question.last_tokens > 0,
            "the question that stays is known when the prompt has been seen", "schedule=once", schedule);
  refuse_if(rolling && (plan.score || !by_rule), "schedule=rolling keeps the first and the last tokens by rule",
            "streaming-llm or local", "another policy");
  const auto* transformed = std::get_if<Transformed>(&plan.store);
  refuse_if(reads && (!everything || !std::holds_alternative<Exact>(plan.store)),
            "each query reads some of the whole prompt, as it is", "no other allocator and store",
            everything ? "another store" : allocator);
  refuse_if(transformed != nullptr && transformed->paired_with && !everything, "layers are merged token by token",
            "every token in both", allocator);
  refuse_if(transformed != nullptr && !once, "a store changes tokens at the end of the prompt", "schedule=once",
            schedule);
  refuse_if(transformed != nullptr && plan.grouping.heads == Heads::query,
            "a store that changes tokens holds each once a KV head", "heads=kv or heads=layer", "heads=query");
}

void check_layers_apart(const std::string& who, const Plan& plan) {
  const auto refuse_if = [&who](bool unfit, const char* expected, const char* found) {
    if (unfit) throw Error{Refusal::usage, who, "its layers depend on each other", expected, found};
  };
  const bool within =
      std::holds_alternative<Uniform>(plan.allocate) || std::holds_alternative<WithinLayer>(plan.allocate);
  if (!has_budget(plan)) throw Error{Refusal::usage, who, "no budget binds it", "a policy that one binds"};
  refuse_if(plan.nesting != Nesting::none, "a policy whose layers are not nested", "one whose layers are");
  refuse_if(shares_layers(plan.share), "share=none", "layers that share a set");
  refuse_if(!within, "allocate=uniform", name_of(plan.allocate));
}

}  // namespace kvreplay
