// Every pair of parts that do not fit together is refused with its reason, and what fits is not.

#include <gtest/gtest.h>

#include "policies/plan_part.h"
#include "policies/schedules/schedules.h"
#include "policies/text/configured.h"

namespace kvreplay {
namespace {

std::string refusal_of(const std::string& policy) {
  try {
    ConfiguredPolicy::parse(policy);
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::usage) << policy;
    EXPECT_FALSE(error.expected().empty()) << policy;
    return error.what();
  }
  return "accepted";
}

struct Refused {
  const char* policy;
  const char* message;
};

const Refused refused[] = {
    {"strided:select=top-k", "strided: the selector reads scores: expected a score, as in score=window, found none"},
    {"strided:select=chunks", "strided: the selector reads scores: expected a score, as in score=window, found none"},
    {"local:allocate=pyramid",
     "local: protected tokens fill the whole budget: expected another policy for this part, found counts from the "
     "number of "
     "layers"},
    {"strided:allocate=dynamickv",
     "strided: the allocator needs scores: expected a score, or allocate=uniform, found no score"},
    {"local:select=redundancy",
     "local: protected tokens fill the whole budget: expected another policy for this part, found a selector without "
     "scores"},
    {"strided:select=redundancy",
     "strided: the similarity of tokens covers all heads together: expected heads=layer, found a set for each head"},
    {"pyramid-infer:allocate=uniform",
     "pyramid-infer: nested sets need token counts that do not depend on scores: expected allocate=decay or "
     "allocate=pyramid, "
     "found uniform"},
    {"pyramid-infer:schedule=every",
     "pyramid-infer: nested sets are selected at the end of the prompt: expected schedule=once, found "
     "schedule=every"},
    {"pyramid-kv:schedule=every",
     "pyramid-kv: a schedule needs the same number of tokens in every layer and head: expected allocate=uniform, found "
     "counts from the number of layers"},
    {"oracle:schedule=threshold(4,2)",
     "oracle: a score from future queries is available only at the end of the prompt: expected schedule=once, found "
     "schedule=threshold"},
    {"h2o:score=question,schedule=threshold(8,4)",
     "h2o: score=question needs a question that is not evicted: expected schedule=question-blocks, found "
     "schedule=threshold"},
    {"h2o:score=question",
     "h2o: score=question needs a question that is not evicted: expected schedule=question-blocks, found "
     "schedule=once"},
    {"truncate:schedule=every",
     "truncate: the selector reads the whole prompt: expected schedule=once, found schedule=every"},
    {"compactor:schedule=every",
     "compactor: the score is computed once over the whole prompt: expected schedule=once, found schedule=every"},
    {"pyramid-infer:select=head-and-tail",
     "pyramid-infer: the selector reads the whole prompt: expected a policy whose layers are not nested, found "
     "a policy with nested layers"},
    {"streaming-llm:positions=cache,store=quantised",
     "streaming-llm: the policy sets the store by its parameter positions: expected store=exact or cache, found "
     "store=quantised"},
    {"h2o:schedule=online,agg=max",
     "h2o: schedule=online averages over the query heads of a group: expected agg=mean, "
     "found agg=sum or max"},
    {"snapkv:schedule=online",
     "snapkv: schedule=online evicts by attention, query by query: expected score=cumulative or score=newest, found "
     "another score"},
    {"observed-attention:schedule=online",
     "observed-attention: schedule=online evicts by attention, query by query: expected score=cumulative or "
     "score=newest, found another score"},
    {"nacl:schedule=every",
     "nacl: a protected question is known only after the whole prompt: expected schedule=once, found "
     "schedule=every"},
    {"simlayerkv:schedule=every",
     "simlayerkv: a schedule needs the same number of tokens in every layer and head: expected allocate=uniform, found "
     "counts from a layer's scores"},
    {"simlayerkv:select=stride",
     "simlayerkv: the allocator needs scores: expected a score, or allocate=uniform, found no score"},
    {"snapkv:schedule=question-blocks(9,relevance)",
     "snapkv: order=relevance needs cache positions: expected store=cache, or "
     "order=position, found tokens at their original positions"},
    {"h2o:schedule=online,store=cache",
     "h2o: schedule=online scores tokens at their original positions: expected store=exact, found another store"},
    {"strided:schedule=online",
     "strided: schedule=online selects the evicted token itself: expected select=top-k, found another selector"},
    {"tova:schedule=online,window_at=question",
     "tova: window_at=question needs the whole prompt: expected schedule=once, found schedule=online"},
    {"h2o:schedule=rolling",
     "h2o: schedule=rolling keeps only attention sinks and a recent window: expected streaming-llm or local, found "
     "another policy"},
    {"strided:schedule=rolling",
     "strided: schedule=rolling selects the evicted token itself: expected select=top-k, found another selector"},
    {"snapkv:store=quantised,schedule=every",
     "snapkv: a store changes tokens at the end of the prompt: expected schedule=once, found schedule=every"},
    {"snapkv:store=quantised,heads=query",
     "snapkv: a store that changes tokens needs one copy of a token per KV head: expected heads=kv or heads=layer, "
     "found "
     "heads=query"},
};

TEST(PlanRules, WhatDoesNotFitIsRefusedWithItsReason) {
  for (const auto& [policy, message] : refused) EXPECT_EQ(refusal_of(policy), message);
}

TEST(PlanRules, SlotsInTheOrderOfScoresAreThoseOfTheCache) {
  EXPECT_NO_THROW(ConfiguredPolicy::parse("finch:order=relevance").plans(2));
  EXPECT_THROW(ConfiguredPolicy::parse("finch:order=relevance,positions=original").plans(2), Error);
}

TEST(PlanRules, AScheduleIsCalledWhatItWasAskedAs) {
  EXPECT_EQ(refusal_of("pyramid-infer:schedule=every(5)"),
            "pyramid-infer: nested sets are selected at the end of the prompt: expected schedule=once, found "
            "schedule=every");
  EXPECT_EQ(refusal_of("pyramid-infer:schedule=question-blocks(5)"),
            "pyramid-infer: nested sets are selected at the end of the prompt: expected schedule=once, found "
            "schedule=question-blocks");
}

TEST(PlanRules, PartsShareNoParameterByAccident) {
  EXPECT_EQ(refusal_of("dynamickv:score=question,schedule=question-blocks"),
            "dynamickv:norm: ambiguous: two parts use this parameter differently: expected normalisation of counts to "
            "weights, found "
            "weight of a query: the share of keys that it sees, or 1");
  EXPECT_TRUE(refusal_of("cur:select=redundancy,heads=layer")
                  .starts_with("cur:use: ambiguous: two parts use this parameter differently: "));
  const auto text_of = [](const char* policy, const char* name) {
    return ConfiguredPolicy::parse(policy).parameters().find(name)->text();
  };
  EXPECT_EQ(text_of("cur:schedule=every(9)", "block"), text_of("cur", "block"));
  EXPECT_EQ(text_of("cur:schedule=every(9)", "interval"), "9");
  EXPECT_EQ(text_of("chunkkv:select=chunks(7)", "chunk"), "7") << "the policy's own, in the same place";
  EXPECT_EQ(text_of("random:seed=4,select=sampled", "seed"), "4") << "means the same everywhere";
}

/// As `every` was, when its interval was called `block`.
struct InBlocks {
  static constexpr PartKind kind = PartKind::schedule;
  static constexpr const char* name = "in-blocks";
  static constexpr const char* summary = "as every";
  int block = 512;

  void parameters(Parameters& p) { p.add("block", block, IntRange{.least = 1}, "tokens of the prompt between cuts"); }
  void fill(Plan& plan) const { plan.schedule = after_every(block); }
};

TEST(PlanRules, OneNameWithOneRangeMayStillMeanTwoThings) {
  std::vector<Registration> registrations;
  pending_registrations = &registrations;
  const RegisteredPart<InBlocks> registered;
  pending_registrations = nullptr;
  EXPECT_EQ(refusal_of("cur:schedule=in-blocks(9)"),
            "cur:block: ambiguous: two parts use this parameter differently: expected tokens per block; a token is "
            "compared with its "
            "block, found tokens of the prompt between cuts");
  EXPECT_EQ(refusal_of("knorm:schedule=in-blocks(9)"), "accepted");
  for (const Registration& each : registrations) each.take_back();
}

TEST(PlanRules, ASelectorThatReadsTheLayerNeedsItResident) {
  // No policy by name gets there: what reads the layer reads no scores, which allocators across layers divide.
  Plan plan;
  plan.grouping.heads = Heads::layer;
  plan.score.score = [](const LayerView&, const Scoring&) { return Matrix(); };
  plan.allocate = across_layers([](const Division&, LayerScores) { return LayerCounts(); });
  EXPECT_NO_THROW(check_plan("mine", plan));
  plan.select.reads_layer = true;
  EXPECT_THROW(check_plan("mine", plan), Error);
  plan.allocate = by_layer([](const Division&) { return std::vector<int>(); });
  EXPECT_NO_THROW(check_plan("mine", plan));
  plan.nesting = Nesting::within_previous;
  EXPECT_NO_THROW(check_plan("mine", plan)) << "one set a layer is chosen while it is resident";
  plan.grouping.heads = Heads::kv;
  EXPECT_THROW(check_plan("mine", plan), Error);
}

TEST(PlanRules, WhatFitsIsTaken) {
  for (const char* policy : {"local:score=window,select=top-k",
                             "h2o:schedule=online",
                             "h2o:schedule=online,heads=query,agg=max",
                             "random:score=cumulative,schedule=online",
                             "tova:schedule=online",
                             "snapkv:score=newest,schedule=online",
                             "streaming-llm:schedule=rolling",
                             "local:schedule=rolling",
                             "snapkv:schedule=every,heads=layer",
                             "snapkv:schedule=every,heads=query",
                             "h2o:schedule=threshold(8,4),heads=query",
                             "h2o:score=question,schedule=question-blocks",
                             "snapkv:store=quantised,heads=layer",
                             "snapkv:heads=query,store=cache",
                             "snapkv:store=cache,schedule=question-blocks(9,relevance)",
                             "random:schedule=threshold(0.5,0.25)",
                             "strided:schedule=every",
                             "snapkv:select=stride",
                             "h2o:select=chunks,chunk=10,allocate=pyramid",
                             "snapkv:allocate=dynamickv,r_max=3"})
    EXPECT_EQ(refusal_of(policy), "accepted") << policy;
}

TEST(PlanRules, LayersStandApartWhereEachDependsOnItselfAlone) {
  for (const char* policy :
       {"snapkv", "ada-kv", "h2o:select=chunks", "h2o-online", "oracle:scope=layer", "streaming-llm"})
    EXPECT_NO_THROW(ConfiguredPolicy::parse(policy).check_layers_apart()) << policy;
  for (const char* policy :
       {"chunkkv:reuse=2", "sca", "pyramid-kv", "pyramid-infer", "dynamickv", "oracle:scope=global",
        "oracle:counts=snapkv", "hybrid", "layers:0-3=snapkv", "full", "simlayerkv", "snapkv:allocate=list((2,1))"})
    EXPECT_THROW(ConfiguredPolicy::parse(policy).check_layers_apart(), Error) << policy;
}

TEST(PlanRules, ABudgetBindsWhatEvictsByOne) {
  const auto bound = [](const char* policy) {
    for (const LayerPlan& part : ConfiguredPolicy::parse(policy).plans(2))
      if (!has_budget(part.plan)) return false;
    return true;
  };
  for (const char* policy : {"snapkv", "h2o-online", "finch", "sca", "pyramid-infer", "snapkv:store=quantised"})
    EXPECT_TRUE(bound(policy)) << policy;
  for (const char* policy : {"full", "kivi", "simlayerkv", "sca:schedule=threshold(8,4)",
                             "pyramid-infer:lengths=natural", "random:schedule=threshold(0.5,0.2)"})
    EXPECT_FALSE(bound(policy)) << policy;
}

}  // namespace
}  // namespace kvreplay
