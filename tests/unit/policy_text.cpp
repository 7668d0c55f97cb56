// Policies, parameters and budgets as users write them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <sstream>
#include <utility>

#include "policies/schedules/blocks.h"
#include "policies/text/configured.h"
#include "policies/text/engine_rules.h"
#include "policies/text/policy_file.h"
#include "policies/text/policy_source.h"
#include "policies/text/structure.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

/// The message of the Error that `call` throws.
template <class Call>
std::string refusal_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::usage);
    return error.what();
  }
  return "accepted";
}

std::string refusal_of_policy(const std::string& text) {
  return refusal_of([&] { ConfiguredPolicy::parse(text).plans(2); });
}

TEST(SplitPolicies, PieceWithValueBelongsToThePolicyBeforeIt) {
  using Pieces = std::vector<std::string>;
  EXPECT_EQ(split_policies("h2o,snapkv:window=32,pool=avg,random"),
            (Pieces{"h2o", "snapkv:window=32,pool=avg", "random"}));
  EXPECT_EQ(split_policies("h2o,recent=3"), (Pieces{"h2o:recent=3"}));
  EXPECT_EQ(split_policies(" h2o , snapkv:window=32, pool=avg "), (Pieces{"h2o", "snapkv:window=32,pool=avg"}));
  EXPECT_EQ(split_policies("oracle:counts=(snapkv:window=2,kernel=3),local"),
            (Pieces{"oracle:counts=(snapkv:window=2,kernel=3)", "local"}));
  EXPECT_EQ(refusal_of([] { split_policies("window=3"); }),
            "policy: parameter before the first policy: expected NAME[:KEY=VALUE,...], found window=3");
  EXPECT_EQ(refusal_of([] { split_policies("h2o,,local"); }),
            "policy: empty list element: expected a value beside each comma, found \"h2o,,local\"");
  EXPECT_EQ(refusal_of([] { split_policies(""); }),
            "policy: empty list element: expected a value beside each comma, found \"\"");
  EXPECT_EQ(refusal_of([] { split_policies("oracle:counts=(h2o"); }),
            "policy: unbalanced parentheses: found \"oracle:counts=(h2o\"");
  EXPECT_EQ(refusal_of([] { split_policies("h2o)"); }), "policy: unbalanced parentheses: found \"h2o)\"");
  const std::string deep = std::string(100000, '(') + "h2o" + std::string(100000, ')');
  EXPECT_EQ(refusal_of([&] { split_policies("oracle:counts=" + deep); }),
            "policy: too many nested parentheses: expected at most 16 levels, found more");
}

TEST(ConfiguredPolicy, LabelNamesWhatDiffersAndParamsNameAll) {
  EXPECT_EQ(ConfiguredPolicy::parse("snapkv").label(), "snapkv");
  EXPECT_EQ(ConfiguredPolicy::parse("snapkv:kernel=5,window=8").label(), "snapkv:kernel=5");
  EXPECT_EQ(ConfiguredPolicy::parse("h2o").params(), "recent=0.5,heads=kv,agg=mean,overlap=false,sinks=0");
  EXPECT_EQ(ConfiguredPolicy::parse("h2o:recent=25%").params(), "recent=0.25,heads=kv,agg=mean,overlap=false,sinks=0");
  EXPECT_EQ(ConfiguredPolicy::parse("oracle:counts=(snapkv:window=8,kernel=5)").params(),
            "heads=kv,agg=mean,scope=head,counts=(snapkv:kernel=5),free=tokens");
  const std::string label = ConfiguredPolicy::parse("oracle:counts=(snapkv:kernel=5)").label();
  EXPECT_EQ(ConfiguredPolicy::parse(label).params(),
            ConfiguredPolicy::parse("oracle:counts=(snapkv:kernel=5)").params());
}

TEST(ConfiguredPolicy, PresetComesFirstAndValuesOverrideIt) {
  EXPECT_EQ(ConfiguredPolicy::parse("snapkv:window=16,preset=kvpress").label(), "snapkv:window=16,kernel=5,pool=avg");
  EXPECT_EQ(ConfiguredPolicy::parse("snapkv:preset=factory").label(), "snapkv");
  EXPECT_EQ(ConfiguredPolicy::parse("h2o:preset=factory").label(), "h2o:recent=8");
  for (const char* harness : {"factory-needle", "dynamickv"}) {
    const std::string preset = ":preset=" + std::string(harness);
    EXPECT_EQ(ConfiguredPolicy::parse("snapkv" + preset).label(), "snapkv:window=32");
    EXPECT_EQ(ConfiguredPolicy::parse("h2o" + preset).label(), "h2o:recent=32");
    EXPECT_EQ(ConfiguredPolicy::parse("pyramid-kv" + preset).label(), "pyramid-kv");
  }
  EXPECT_EQ(ConfiguredPolicy::parse("cam-one-shot:preset=factory-needle").label(), "cam-one-shot:recent=32");
  EXPECT_EQ(ConfiguredPolicy::parse("dynamickv:preset=llama-3").label(), "dynamickv:pool=avg");
  EXPECT_EQ(ConfiguredPolicy::parse("dynamickv:preset=internlm").label(), "dynamickv:pool=avg");
  EXPECT_EQ(ConfiguredPolicy::parse("dynamickv:preset=mistral").label(), "dynamickv");
  EXPECT_EQ(ConfiguredPolicy::parse("dynamickv:preset=qwen2").label(), "dynamickv:r_max=5");
  // What a preset says may stand unread, also where its values are written out.
  const std::string label = ConfiguredPolicy::parse("snapkv:preset=snapkv-code,score=cumulative").label();
  EXPECT_EQ(ConfiguredPolicy::parse(label).label(), label);
  EXPECT_EQ(ConfiguredPolicy::parse("oracle:counts=(" + label + ")").name(), "oracle");
}

TEST(ConfiguredPolicy, ThePressesOfKvpressHaveItsDefaults) {
  const auto label = [](const char* text) { return ConfiguredPolicy::parse(text).label(); };
  EXPECT_EQ(label("SnapKVPress"), "snapkv:window=64,kernel=5,pool=avg");
  EXPECT_EQ(label("snapkv_press:kernel=3"), "snapkv:window=64,kernel=3,pool=avg") << "values override the preset";
  EXPECT_EQ(label("SnapKVPress:preset=factory"), "snapkv");
  for (const char* text : {"SnapKVPress", "snapkv:preset=kvpress"})
    EXPECT_EQ(ConfiguredPolicy::without_preset(text), "snapkv:window=64,kernel=5,pool=avg");
  for (const char* text : {"snapkv", "SnapKV", "snapkv:window=64", "nothing:x"})
    EXPECT_EQ(ConfiguredPolicy::without_preset(text), text);
  EXPECT_EQ(label("SnapKV"), "snapkv");
  EXPECT_EQ(label("TOVAPress"), "tova:protect_last=true");
  EXPECT_EQ(label("LeverageScorePress"), "leverage:sketch=48");
  EXPECT_EQ(label("CompactorPress"), "compactor:sketch=48");
  EXPECT_EQ(label("ThinKPress"), "think:recent=0");
  EXPECT_EQ(label("FinchPress"), "finch:blocks=1000000000,heads=kv");
  EXPECT_EQ(label("ChunkKVPress"), "chunkkv:chunk=20,window_mode=whole,window=64");
  EXPECT_EQ(label("KnormPress"), "knorm") << "without a preset, its own defaults are those of kvpress";
}

TEST(ConfiguredPolicy, HasThePresetsOfKvCacheFactory) {
  const auto label = [](const char* name) {
    return ConfiguredPolicy::parse(std::string(name) + ":preset=factory").label();
  };
  EXPECT_EQ(label("ada-kv"), "ada-kv:normalise=true");
  EXPECT_EQ(label("cam-one-shot"), "cam-one-shot:recent=8");
  EXPECT_EQ(label("knorm"), "knorm:skip_layers=(0,1)");
}

TEST(ConfiguredPolicy, SeedIsTheDefaultOfSeedParameters) {
  EXPECT_EQ(ConfiguredPolicy::parse("random", 7).label(), "random:seed=7");
  EXPECT_EQ(ConfiguredPolicy::parse("random:seed=0", 7).label(), "random");
}

TEST(ConfiguredPolicy, HasOneNameInEverySpelling) {
  for (const std::string& name : policies().names()) {
    std::string other = name + "-Press";
    std::ranges::transform(other, other.begin(),
                           [](char c) { return c == '-' ? '_' : static_cast<char>(std::toupper(c)); });
    EXPECT_EQ(registered_policy(other), name) << other;
    std::istringstream others(policies().get(name).make()->card().other_names);
    for (std::string one; others >> one;) EXPECT_EQ(registered_policy(one), name) << one;
  }
  EXPECT_EQ(registered_policy("Press"), "Press");
  EXPECT_EQ(ConfiguredPolicy::parse("critical-kv:base=(SnapKVPress:window=4)").label(),
            "critical-kv:base=(snapkv:window=4,kernel=5,pool=avg)");
}

TEST(Budget, OfACompressionRatio) {
  for (const auto& [ratio, budget] : {std::pair("0.9", "0.1"),
                                      {"0.95", "0.05"},
                                      {"0.123456789", "0.876543211"},
                                      {"0", "1.0"},
                                      {"0.50", "0.5"},
                                      {"0.99999999", "1e-08"}}) {
    EXPECT_EQ(Budget::of_compression_ratio(ratio), budget);
    EXPECT_GT(Budget::parse(Budget::of_compression_ratio(ratio)).fraction, 0) << ratio;
  }
  for (const char* ratio : {"1", "-0.1", "nan"})
    EXPECT_NE(refusal_of([&] { Budget::of_compression_ratio(ratio); }), "accepted") << ratio;
}

TEST(ConfiguredPolicy, RefusesInOneLine) {
  EXPECT_EQ(refusal_of_policy("snapvk"), "snapvk: unknown policy: did you mean snapkv?");
  EXPECT_EQ(refusal_of_policy("snapkv:windw=3"), "snapkv: unknown parameter windw: did you mean window?");
  EXPECT_EQ(refusal_of_policy("snapkv:protekt=3"), "snapkv: unknown parameter protekt: did you mean protect?");
  EXPECT_EQ(refusal_of_policy("streaming-llm:preset=x").find("protect"), std::string::npos) << "it would be refused";
  EXPECT_EQ(refusal_of_policy("streaming-llm:window_ad=x").find("window_at"), std::string::npos) << "so would this";
  EXPECT_EQ(refusal_of_policy("snapkv:window"), "snapkv: not an assignment: expected KEY=VALUE, found \"window\"");
  EXPECT_EQ(refusal_of_policy("snapkv:window=3,window=4"),
            "snapkv: given more than once: expected one value, found window");
  EXPECT_EQ(refusal_of_policy("snapkv:window=0"), "snapkv:window: out of range: expected 1.., found 0");
  EXPECT_EQ(refusal_of_policy("snapkv:kernel=4"), "snapkv:kernel: out of range: expected 1.., odd, found 4");
  EXPECT_EQ(refusal_of_policy("snapkv:window=3x"),
            "snapkv:window: not a number: expected a whole number, found \"3x\"");
  EXPECT_EQ(refusal_of_policy("snapkv:window="), "snapkv:window: not a number: expected a whole number, found \"\"");
  EXPECT_EQ(refusal_of_policy("snapkv:pool=mx"),
            "snapkv:pool: unknown value: expected one of none, max, avg, found \"mx\"");
  EXPECT_EQ(refusal_of_policy("snapkv:preset=factry"),
            "snapkv:preset: unknown value \"factry\": did you mean factory?");
  EXPECT_EQ(refusal_of_policy("snapkv:windw=3,"),
            "snapkv: empty list element: expected a value beside each comma, found \"windw=3,\"");
  EXPECT_EQ(refusal_of_policy("h2o:recent=1.5"),
            "h2o:recent: out of range: expected a number of tokens, or a fraction 0.0..1.0, found 1.5");
  EXPECT_EQ(refusal_of_policy("h2o:recent=-3"), "h2o:recent: out of range: expected 0 or more, found -3");
  EXPECT_EQ(refusal_of_policy("h2o:overlap=yes"), "h2o:overlap: not a Boolean: expected false or true, found \"yes\"");
  EXPECT_EQ(refusal_of_policy("local:recent=3"),
            "local: takes no parameters: expected a part, as in select=chunks, found recent");
  EXPECT_EQ(refusal_of_policy("random:heads=query"),
            "random:heads: unknown value: expected one of kv, layer, found \"query\"");
  EXPECT_EQ(refusal_of_policy("oracle:counts=(oracle:counts=h2o)"),
            "oracle:counts: the policy takes its own counts from another policy: expected a policy that does not use "
            "another policy's counts, found oracle:counts=h2o");
}

TEST(ConfiguredPolicy, OracleTakesCountsFromAPolicyThatHasSome) {
  EXPECT_EQ(refusal_of_policy("oracle:counts=(full)"),
            "oracle:counts: the policy keeps every token: expected a policy that evicts, found full");
  EXPECT_EQ(refusal_of_policy("oracle:scope=global,counts=(h2o)"),
            "oracle: heads and scope are those of the policy in counts: expected counts without heads and scope, found "
            "heads or scope beside counts=(h2o)");
}

TEST(ConfiguredPolicy, ValueOfTheUserMustFitTheTraceAndADefaultIsClamped) {
  EXPECT_EQ(refusal_of([] { ConfiguredPolicy::parse("streaming-llm:sinks=9").check_limits(8, 2); }),
            "streaming-llm:sinks: exceeds the trace: expected at most 8 tokens, found 9");
  EXPECT_EQ(refusal_of([] { ConfiguredPolicy::parse("chunkkv:reuse=3").check_limits(8, 2); }),
            "chunkkv:reuse: exceeds the trace: expected at most 2 layers, found 3");
  EXPECT_EQ(refusal_of([] { ConfiguredPolicy::parse("h2o:recent=9").check_limits(8, 2); }),
            "h2o:recent: exceeds the trace: expected at most 8 tokens, found 9");
  EXPECT_NO_THROW(ConfiguredPolicy::parse("streaming-llm").check_limits(2, 1));
}

TEST(ComposedPolicy, PartsByNameFillThePlan) {
  const auto plan = [](const char* text) { return ConfiguredPolicy::parse(text).plans(4).front().plan; };
  EXPECT_TRUE(plan("h2o").allocate->is_uniform);
  EXPECT_TRUE(plan("h2o:allocate=pyramid").allocate->is_by_layer);
  EXPECT_EQ(plan("h2o:allocate=dynamickv").allocate->from, CountsFrom::all_layers);
  EXPECT_FALSE(plan("strided").score);
  EXPECT_EQ(plan("local:score=window,window=5").score.needs.last_queries, 5);
  EXPECT_TRUE(plan("h2o:score=random").score);
  EXPECT_FALSE(plan("h2o:score=random").score.needs.all_queries) << "the part takes the place of the policy's own";
  EXPECT_EQ(plan("snapkv:share=every,reuse=3").share.source(2, 4), 0);
  EXPECT_EQ(plan("snapkv:share=one,layer=1").share.source(3, 4), 1);
  EXPECT_EQ(plan("random:schedule=threshold(0.5,12)").schedule->name(), "schedule=threshold");
  EXPECT_EQ(plan("random:schedule=threshold(0.5,12)").schedule->held(90), 12);
  const auto interval = [&](const char* text) {
    return dynamic_cast<const BlockSchedule&>(*plan(text).schedule).block();
  };
  EXPECT_EQ(interval("snapkv:schedule=every(16)"), 16);
  EXPECT_EQ(interval("snapkv:schedule=every,interval=9"), 9);
  EXPECT_FALSE(plan("h2o:schedule=online(true)").schedule->goes_on_after_prompt());
  EXPECT_TRUE(plan("h2o:schedule=online").schedule->goes_on_after_prompt());
  EXPECT_TRUE(plan("local:store=cache").store->moves_tokens);
  EXPECT_TRUE(plan("snapkv:store=quantised").store->changes_tokens());
}

TEST(ComposedPolicy, PositionsOfAPolicyAreTheStore) {
  for (const char* name : {"streaming-llm", "finch", "sca"}) {
    const auto label = [&](const char* value) { return ConfiguredPolicy::parse(std::string(name) + value).label(); };
    EXPECT_EQ(label(":store=cache"), label(":positions=cache"));
    EXPECT_EQ(label(":store=exact"), label(":positions=original"));
    EXPECT_NE(label(":store=cache"), label(":store=exact"));
    EXPECT_THROW(label(":store=cache,positions=cache"), Error);
  }
}

TEST(ComposedPolicy, ItsTextIsTheSamePolicyAgain) {
  for (const char* text :
       {"h2o:select=chunks,chunk=10,allocate=pyramid,beta=5", "random:schedule=threshold(0.5,0.25)",
        "snapkv:window=16,score=window", "snapkv:store=quantised,bits=4", "snapkv:store=quantised(residual=0,bits=4)",
        "snapkv:store=kv(fp8_e4m3(scale=head),q8_0),hadamard=16,skip_layers=(0,2)",
        "full:store=kv(turboquant(bits=2),turboquant(seed=3))", "local:score=cumulative,select=chunks(7)",
        "sca:schedule=threshold(4000,2000)", "finch:question=last,order=relevance",
        "hybrid:chunkkv.chunk=20,snapkv.window=4", "oracle:counts=(h2o:select=chunks,chunk=3)",
        "layers:0-1=(chunkkv:chunk=20),2=snapkv,3=(h2o:schedule=threshold(8,4))"}) {
    SCOPED_TRACE(text);
    const ConfiguredPolicy policy = ConfiguredPolicy::parse(text);
    EXPECT_EQ(ConfiguredPolicy::parse(policy.label()).params(), policy.params());
    EXPECT_EQ(ConfiguredPolicy::parse(policy.label()).label(), policy.label());
    EXPECT_EQ(ConfiguredPolicy::parse(policy.name() + ":" + policy.params()).params(), policy.params());
    EXPECT_EQ(split_policies(policy.label() + ",local"), (std::vector<std::string>{policy.label(), "local"}));
  }
}

TEST(ComposedPolicy, LabelNamesPartsAndWhatDiffers) {
  EXPECT_EQ(ConfiguredPolicy::parse("h2o:allocate=pyramid,select=chunks,recent=0.5,chunk=10").label(),
            "h2o:allocate=pyramid,select=chunks");
  EXPECT_EQ(ConfiguredPolicy::parse("h2o:select=chunks,chunk=5").label(), "h2o:select=chunks,chunk=5");
  EXPECT_EQ(ConfiguredPolicy::parse("hybrid:chunkkv.chunk=20").label(), "hybrid:chunkkv.chunk=20");
  EXPECT_EQ(ConfiguredPolicy::parse("layers:2=local,0-1=(snapkv:kernel=7)").label(), "layers:2=local,0-1=snapkv");
  EXPECT_EQ(ConfiguredPolicy::parse("kivi:preset=table11").label(), "kivi:group=64,residual=0");
  EXPECT_EQ(ConfiguredPolicy::parse("sca:schedule=threshold(8,4)").label(), "sca:schedule=threshold(8,4)");
}

TEST(ComposedPolicy, AParameterThatBothHaveIsOne) {
  // The window of the policy's protection is that of the part's score.
  const ConfiguredPolicy policy = ConfiguredPolicy::parse("chunkkv:window=3,score=window");
  const Plan plan = policy.plans(1).front().plan;
  EXPECT_EQ(plan.protect.recent.count, 3);
  EXPECT_EQ(plan.score.needs.last_queries, 3);
  const std::string params = policy.params();
  EXPECT_EQ(params.find("window="), params.rfind(",window=") + 1) << params;
}

TEST(ComposedPolicy, AValueThatNothingReadsIsRefused) {
  EXPECT_EQ(refusal_of_policy("pyramid-kv:beta=3,allocate=uniform"),
            "pyramid-kv:beta: unused parameter: expected the allocate of pyramid-kv itself, found allocate=uniform");
  EXPECT_EQ(refusal_of_policy("h2o:overlap=true,select=chunks"),
            "h2o:overlap: unused parameter: expected the select of h2o itself, found select=chunks");
  EXPECT_EQ(refusal_of_policy("snapkv:kernel=9,score=cumulative"),
            "snapkv:kernel: unused parameter: expected the score of snapkv itself, found score=cumulative");
  EXPECT_EQ(refusal_of_policy("snapkv:kernel=9,select=stride"),
            "snapkv:kernel: unused parameter: expected the score of snapkv itself, found a selector without scores");
  EXPECT_EQ(refusal_of_policy("chunkkv:reuse=2,share=none"),
            "chunkkv:reuse: unused parameter: expected the share of chunkkv itself, found share=none");
  // What the part that takes the place reads too, what others read as well, and what was not changed.
  for (const char* text : {"pyramid-kv:beta=3,allocate=pyramid", "chunkkv:window=3,score=cumulative",
                           "pyramid-kv:beta=20,allocate=uniform", "chunkkv:chunk=3,allocate=pyramid,beta=3"})
    EXPECT_NO_THROW(ConfiguredPolicy::parse(text)) << text;
}

TEST(LayerRanges, EachIsReplayedByAPolicyOfItsOwn) {
  const ConfiguredPolicy policy = ConfiguredPolicy::parse("layers:3=(h2o:heads=query),0-2=(chunkkv:reuse=2)");
  const std::vector<LayerPlan> plans = policy.plans(4);
  ASSERT_EQ(plans.size(), 2U);
  EXPECT_EQ(plans[0].first, 0);
  EXPECT_EQ(plans[0].count, 3);
  EXPECT_EQ(plans[0].plan.grouping.heads, Heads::layer);
  EXPECT_EQ(plans[0].plan.share.source(1, 3), 0);
  EXPECT_EQ(plans[1].first, 3);
  EXPECT_EQ(plans[1].count, 1);
  EXPECT_EQ(plans[1].plan.grouping.heads, Heads::query);
}

TEST(LayerRanges, MustCoverEachLayerOnce) {
  const auto refusal = [](const char* text, int layers) {
    return refusal_of([&] { ConfiguredPolicy::parse(text).plans(layers); });
  };
  const std::string cover = "layers: ranges must cover each treated layer once: expected 0-3, found ";
  EXPECT_EQ(refusal("layers:0-1=h2o,3=local", 4), cover + "0-1, 3");
  EXPECT_EQ(refusal("layers:0-2=h2o,2-3=local", 4), cover + "0-2, 2-3");
  EXPECT_EQ(refusal("layers:0-4=h2o", 4), cover + "0-4");
  EXPECT_EQ(refusal("layers:0-2=h2o", 4), cover + "0-2");
  EXPECT_EQ(refusal("layers:1-3=h2o", 4), cover + "1-3");
  EXPECT_EQ(refusal("layers", 4), cover + "no range");
  EXPECT_EQ(refusal("layers:3=local,0-2=h2o", 4), "accepted");
  EXPECT_EQ(refusal("layers:2-1=h2o", 4), "layers:2-1: ends before it begins: expected FIRST-LAST, found 2-1");
  EXPECT_EQ(refusal("layers:00-3=h2o", 4), "layers:00-3: not in canonical form: expected 0-3, found 00-3");
  EXPECT_EQ(refusal("layers:0-3=(sca:layer=4)", 4), "accepted") << "how many layers there are, the trace says";
  EXPECT_NE(refusal("layers:0-x=h2o", 4), "accepted");
  EXPECT_NE(refusal("layers:-1=h2o", 4), "accepted");
  EXPECT_NE(refusal("layers:0-1-2=h2o,3=h2o", 4), "accepted");
  EXPECT_NE(refusal("layers:0-3=(snapkw)", 4), "accepted");
}

class PolicyFile : public TraceFiles {
 protected:
  std::filesystem::path written(const std::string& text) {
    std::ofstream(file("mine.yaml")) << text;
    return file("mine.yaml");
  }
  /// What reading it says, without the folder.
  std::string refusal(const std::string& text) {
    const std::string message = refusal_of([&] { policies_of_file(written(text)); });
    const std::size_t name = message.find("mine.yaml");
    return name == std::string::npos ? message : message.substr(name);
  }
};

TEST_F(PolicyFile, OnePolicyOrAListOfTexts) {
  using Pieces = std::vector<std::string>;
  EXPECT_EQ(policies_of_file(written("snapkv:window=32\n")), Pieces{"snapkv:window=32"});
  EXPECT_EQ(policies_of_file(written("policy: chunkkv\nchunk: 20\nheads: kv\n")), Pieces{"chunkkv:chunk=20,heads=kv"});
  EXPECT_EQ(policies_of_file(written("- h2o\n- policy: snapkv:window=3\n  kernel: 5\n- policy: local\n")),
            (Pieces{"h2o", "snapkv:window=3,kernel=5", "local"}));
  EXPECT_EQ(policies_of_file(written("policy: oracle\ncounts: snapkv:window=3,kernel=5\n")),
            Pieces{"oracle:counts=(snapkv:window=3,kernel=5)"});
  EXPECT_EQ(policies_of_file(written("policy: layers\n0-1: chunkkv:chunk=3\n2: local\n")),
            (Pieces{"layers:0-1=(chunkkv:chunk=3),2=local"}));
  EXPECT_EQ(policies_of_file(written("policy: sca\nschedule: threshold(8,4)\n")),
            Pieces{"sca:schedule=threshold(8,4)"});
  EXPECT_EQ(split_policies("local,@" + written("- h2o\n- full\n").string() + ",random"),
            (Pieces{"local", "h2o", "full", "random"}));
}

TEST_F(PolicyFile, ListsMultiply) {
  using Pieces = std::vector<std::string>;
  EXPECT_EQ(policies_of_file(written("- policy: snapkv\n  window: [3, 4]\n  kernel: [1, 5]\n- local\n")),
            (Pieces{"snapkv:window=3,kernel=1", "snapkv:window=3,kernel=5", "snapkv:window=4,kernel=1",
                    "snapkv:window=4,kernel=5", "local"}));
  EXPECT_EQ(policies_of_file(written("policy: [h2o, snapkv:kernel=3]\nheads: [kv, query]\n")),
            (Pieces{"h2o:heads=kv", "h2o:heads=query", "snapkv:kernel=3,heads=kv", "snapkv:kernel=3,heads=query"}));
  EXPECT_EQ(policies_of_file(written("policy: oracle\ncounts: [\"snapkv:window=3,kernel=5\", h2o]\n")),
            (Pieces{"oracle:counts=(snapkv:window=3,kernel=5)", "oracle:counts=h2o"}));
}

TEST_F(PolicyFile, WhatIsWrongIsSaidWithItsLine) {
  EXPECT_EQ(refusal("- h2o\n- window: 3\n"),
            "mine.yaml:2: not a policy: expected a string, or a mapping with the key policy, found a mapping without "
            "the key");
  EXPECT_EQ(refusal("- h2o\n-\n  - snapkv\n"),
            "mine.yaml:3: not a policy: expected a string, or a mapping with the key policy, found a list");
  EXPECT_EQ(refusal("policy: snapkv\nwindow:\n  a: 3\n"),
            "mine.yaml:3: value of window: expected a scalar, or a list of scalars, found a mapping");
  EXPECT_EQ(refusal("policy: snapkv\nwindow: []\n"),
            "mine.yaml:2: value of window: expected one value or more, found an empty list");
  EXPECT_EQ(refusal("policy:\n"),
            "mine.yaml:1: value of policy: expected a scalar, or a list of scalars, found nothing");
  EXPECT_EQ(refusal("policy: h2o\nrecent: 3\nrecent: 4\n"),
            "mine.yaml:3: duplicate key: expected one value, found recent");
  EXPECT_EQ(refusal("- h2o\n---\n- local\n"), "mine.yaml:2: second YAML document: expected one document with policies");
  EXPECT_EQ(refusal("# one\n--- \n- h2o\n---\n"),
            "mine.yaml:4: second YAML document: expected one document with policies");
  EXPECT_EQ(refusal("- h2o\n---\t- local\n"), "mine.yaml:2: second YAML document: expected one document with policies");
  EXPECT_EQ(refusal("- h2o\n...\n\n- local\n"),
            "mine.yaml:4: second YAML document: expected one document with policies");
  EXPECT_EQ(refusal("- h2o\n... - local\n"), "mine.yaml:2: second YAML document: expected one document with policies");
  EXPECT_EQ(policies_of_file(written("- h2o\n- ...x\n...\n# the end\n...\n")),
            (std::vector<std::string>{"h2o", "...x"}));
  EXPECT_EQ(policies_of_file(written("%YAML 1.2\n---\n- h2o\n- ---x\n")), (std::vector<std::string>{"h2o", "---x"}));
  EXPECT_EQ(refusal(",,\"x\n"), "mine.yaml: contains no policy: expected one policy, or a list of them") << "0.7 hung";
  EXPECT_EQ(refusal(""), "mine.yaml: contains no policy: expected one policy, or a list of them");
  EXPECT_EQ(refusal("[]\n"), "mine.yaml: contains no policy: expected one policy, or a list of them");
  EXPECT_TRUE(refusal("- h2o\n- [snapkv\n").starts_with("mine.yaml:3: not YAML: expected policies, found "))
      << refusal("- h2o\n- [snapkv\n");
  try {
    policies_of_file(file("missing.yaml"));
    ADD_FAILURE() << "a file that is not there";
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::input);
  }
}

TEST(Budget, LiteralWithAPointIsAFraction) {
  EXPECT_EQ(Budget::parse("0.1").tokens(480), 48);
  EXPECT_EQ(Budget::parse("0.7").tokens(85), 60);  // 59.5 and a half, of which doubles lose the last bit
  EXPECT_EQ(Budget::parse("29.3%").tokens(5000), 1465);
  EXPECT_EQ(Amount::parse("share", "0.29").of(100), 29);
  EXPECT_EQ(Amount::parse("share", "1e-300").of(100), 0);
  EXPECT_EQ(Amount::parse("share", "1.0").of(100), 100);
  EXPECT_EQ(Budget::parse("10%").tokens(480), 48);
  EXPECT_EQ(Budget::parse("0.1").tokens(5), 1);    // floor(0.5 + 0.5)
  EXPECT_EQ(Budget::parse("0.1").tokens(14), 1);   // floor(1.4 + 0.5)
  EXPECT_EQ(Budget::parse("0.1").tokens(15), 2);   // floor(1.5 + 0.5)
  EXPECT_EQ(Budget::parse("0.01").tokens(12), 1);  // at least one
  EXPECT_EQ(Budget::parse("1.0").tokens(12), 12);
  EXPECT_EQ(Budget::parse("1").tokens(12), 1);
  EXPECT_EQ(Budget::parse("512").tokens(12), 512);
}

TEST(Budget, AtSeenGrowsAndIsTheShareOfThePromptThen) {
  EXPECT_EQ(Budget::parse("0.1@seen").tokens(480), 48);
  EXPECT_EQ(Budget::parse("0.1@seen").of_seen(), 0.1);
  EXPECT_EQ(Budget::parse("10%@seen").of_seen(), 0.1);
  EXPECT_EQ(Budget::parse("0.1@seen").literal, "0.1@seen");
  EXPECT_EQ(Budget::parse("0.1").of_seen(), 0.0);
  EXPECT_EQ(Budget::parse("512").of_seen(), 0.0);
}

TEST(Budget, OfMemoryIsAsManySlicesAsFit) {
  EXPECT_EQ(Budget::parse("64KiB").bytes, 65536);
  EXPECT_EQ(Budget::parse("1.5MiB").bytes, 1572864);
  EXPECT_EQ(Budget::parse("2GiB").bytes, 2147483648.0);
  const auto linear = [](double of_token) { return [of_token](int tokens) { return of_token * tokens; }; };
  EXPECT_EQ(Budget::parse("1KiB").tokens(480, linear(256)), 4);
  EXPECT_EQ(Budget::parse("1KiB").tokens(480, linear(257)), 3);
  EXPECT_EQ(Budget::parse("1KiB").tokens(480, linear(1025)), 0) << "none fits";
  EXPECT_EQ(Budget::parse("8GiB").tokens(480, linear(1)), 480) << "all of the prompt";
  EXPECT_EQ(Budget::parse("1KiB").tokens(480, [](int tokens) { return 4 + 200 * std::min(tokens, 2) + 50 * tokens; }),
            12)
      << "a size that is not proportional to the tokens";
}

TEST(Structure, IsMadeOfParts) {
  const auto around = [](const char* structure, const char* policy) {
    return Structure::parse(structure).around(policy);
  };
  const std::string sixteen = "select=chunks,chunk=16,window_mode=whole";
  EXPECT_EQ(around("page=16,heads=layer", "h2o"), "h2o:" + sixteen + ",heads=layer");
  EXPECT_EQ(around("page=16", "snapkv:window=4"), "snapkv:window=4," + sixteen + ",heads=layer");
  EXPECT_EQ(around("heads=query", "snapkv"), "snapkv:" + sixteen + ",heads=query");
  EXPECT_EQ(around("heads=own,page=5", "random"), "random:select=chunks,chunk=5,window_mode=whole");
  EXPECT_EQ(around("page=16", "local"), "local:" + sixteen + ",heads=layer");
  EXPECT_EQ(around("heads=kv", "local"), "local:" + sixteen) << "it has sets of KV heads";

  const Plan streaming = ConfiguredPolicy::parse(around("page=16", "streaming-llm")).plans(2).front().plan;
  EXPECT_EQ(streaming.grouping.heads, Heads::layer);
  EXPECT_EQ(streaming.protect.sinks, 16) << "the page of the four sinks";
}

TEST(Structure, RefusesWhatHasNoPages) {
  const auto refusal = [](const char* structure, const char* policy) {
    return refusal_of([&] { Structure::parse(structure).around(policy); });
  };
  EXPECT_EQ(refusal("page=16", "strided"),
            "strided: the selector reads scores: expected a score, as in score=window, found none");
  EXPECT_EQ(refusal("page=16", "full"),
            "full: every token is kept: expected no score and no selector, found another selector");
  EXPECT_TRUE(refusal("page=16", "layers:0-14=h2o,15-29=snapkv")
                  .starts_with("layers: has a separate plan for each range of layers: expected parts in the policies"));
  EXPECT_EQ(refusal("page=16", "h2o:heads=kv"), "h2o: given more than once: expected one value, found heads");
  EXPECT_EQ(refusal("heads=query", "local"), "local:heads: unknown value: expected layer, found query");
  EXPECT_EQ(refusal("page=0", "h2o"), "--structure:page: out of range: expected 1.., found 0");
  EXPECT_EQ(refusal("pages=16", "h2o"), "--structure: unknown parameter: expected one of page, heads, found pages");
  EXPECT_EQ(refusal("16", "h2o"), "--structure: not an assignment: expected page=16,heads=layer, found 16");
  EXPECT_EQ(refusal("page=16,page=8", "h2o"), "--structure: given more than once: expected one value, found page");
}

TEST(EngineRules, AreMadeOfParts) {
  const auto around = [](const char* engine, const char* policy) { return EngineRules::named(engine).around(policy); };
  EXPECT_EQ(around("vllm", "h2o"), "h2o:select=chunks,chunk=16,window_mode=whole,heads=kv");
  EXPECT_EQ(around("openvino", "snapkv:window=4"),
            "snapkv:window=4,select=chunks,chunk=32,window_mode=whole,heads=layer,schedule=decoding(32)");
  EXPECT_EQ(around("sglang", "knorm"), "knorm:select=chunks,chunk=16,window_mode=whole,heads=layer,share=pooled");
  EXPECT_EQ(around("trtllm", "knorm"), "knorm:schedule=generated");
  EXPECT_EQ(around("trtllm", "snapkv:window=4"), "snapkv:window=4,schedule=generated");
  EXPECT_EQ(EngineRules::named("vllm").protect.text(), "sinks=32,recent=128");
  EXPECT_EQ(refusal_of([&] { around("mlx", "h2o"); }),
            "--engine: no such engine: expected openvino, sglang, trtllm or vllm, found mlx");
  EXPECT_TRUE(refusal_of([&] { around("trtllm", "h2o:schedule=every"); }).starts_with("h2o: given more than once"));
}

Plan plan_of(const std::string& policy) { return ConfiguredPolicy::parse(policy).plans(2).front().plan; }

TEST(CommonParameters, BelongToPoliciesByWhatTheirPlansAreMadeOf) {
  const auto has = [](const char* policy, const char* parameter) {
    return ConfiguredPolicy::parse(policy).parameters().find(parameter) != nullptr;
  };
  for (const char* policy : {"snapkv", "h2o", "h2o-online", "keydiff", "hybrid", "finch", "nacl"})
    EXPECT_TRUE(has(policy, "sinks")) << policy;
  EXPECT_EQ(plan_of("snapkv:sinks=3").protect.sinks, 3);
  EXPECT_EQ(ConfiguredPolicy::parse("hybrid:sinks=3").plans(4).back().plan.protect.sinks, 3);
  EXPECT_EQ(plan_of("critical-kv:wo=none").protect.sinks, 4) << "the base has sinks of its own";
  EXPECT_EQ(plan_of("critical-kv:wo=none,sinks=1").protect.sinks, 1);
  for (const char* policy : {"snapkv", "tova", "vatp:base=scissorhands", "caote", "hybrid", "knorm:score=window"})
    EXPECT_TRUE(has(policy, "window_at")) << policy;
  for (const char* policy : {"h2o", "vatp", "caote:base=cumulative", "nacl", "think", "snapkv:score=cumulative"})
    EXPECT_FALSE(has(policy, "window_at")) << policy;
}

TEST(CommonParameters, StandInLabelsWhereTheyDifferFromTheDefault) {
  const auto label = [](const char* policy) { return ConfiguredPolicy::parse(policy).label(); };
  EXPECT_EQ(label("snapkv:sinks=0,window_at=end"), "snapkv");
  EXPECT_EQ(label("vatp:window_at=question,base=scissorhands"), "vatp:base=scissorhands,window_at=question");
  EXPECT_EQ(label("critical-kv:wo=none,sinks=4"), "critical-kv:wo=none");
  EXPECT_EQ(label("snapkv:protect=(recent=10%,sinks=4)"), "snapkv:protect=(sinks=4,recent=0.1)");
}

TEST(CommonParameters, AreRefusedWhereTheyMeanNothing) {
  const auto refusal = [](const char* policy) { return refusal_of([&] { ConfiguredPolicy::parse(policy); }); };
  const std::string expected = ": expected a policy that selects by score within a budget, found 4";
  for (const char* policy : {"full", "kivi", "think", "minicache", "quest"})
    EXPECT_EQ(refusal((std::string(policy) + ":sinks=4").c_str()),
              policy + std::string(":sinks: ") + policy + " keeps every token" + expected);
  for (const char* policy : {"local", "strided", "truncate", "h2o:select=stride"})
    EXPECT_NE(refusal((std::string(policy) +
                       (std::string_view(policy).find(':') != std::string_view::npos ? "," : ":") + "sinks=4")
                          .c_str())
                  .find("keeps tokens without a score" + expected),
              std::string::npos)
        << policy;
  EXPECT_EQ(refusal("oracle:sinks=4"), "oracle:sinks: oracle is a bound for other policies" + expected);
  EXPECT_EQ(refusal("simlayerkv:protect=(sinks=1)"),
            "simlayerkv:protect: simlayerkv ignores the budget: expected a policy that selects by score within a "
            "budget, found sinks=1");
  EXPECT_EQ(
      refusal("h2o:window_at=question"),
      "h2o:window_at: h2o has no observation window: expected a policy with an observation window, such as snapkv, "
      "found question");
  EXPECT_EQ(refusal("layers:0=h2o,1=snapkv,sinks=4"),
            "layers: has a separate plan for each range of layers: expected sinks= in the policies of the ranges, "
            "found sinks");
  EXPECT_EQ(refusal("snapkv:protect=(4)"), "snapkv:protect: not an assignment: expected sinks=4,recent=10%, found 4");
  EXPECT_EQ(refusal("snapkv:protect=(sinks=4,recent=2,sinks=5)"),
            "snapkv:protect: given more than once: expected one value, found sinks");
  EXPECT_EQ(refusal("h2o:protect=sinks=4,recent=3"),
            "h2o:protect: missing parentheses: expected (sinks=4,recent=10%), found sinks=4")
      << "recent is a parameter of h2o";
  EXPECT_EQ(refusal_of_policy("h2o:sinks=4,protect=(recent=2)"),
            "h2o:sinks: contradicts protect: expected sinks or protect, not both, found sinks=4");
  EXPECT_EQ(refusal_of([] { ConfiguredPolicy::parse("snapkv:protect=(sinks=9)").check_limits(8, 2); }),
            "snapkv:protect: exceeds the trace: expected at most 8 tokens, found 9");
  EXPECT_EQ(refusal_of([] { ConfiguredPolicy::parse("snapkv:sinks=9").check_limits(8, 2); }),
            "snapkv:sinks: exceeds the trace: expected at most 8 tokens, found 9");
}

TEST(ProtectedTokens, TakeThePlaceOfAPolicysOwn) {
  const auto replaced = [](const char* text) {
    ConfiguredPolicy policy = ConfiguredPolicy::parse(text);
    policy.replace_protected(ProtectedTokens::parse("--protect", "sinks=4,recent=10%"));
    return policy.label();
  };
  const std::string protect = "protect=(sinks=4,recent=0.1)";
  EXPECT_EQ(replaced("snapkv:window=16"), "snapkv:window=16," + protect);
  EXPECT_EQ(replaced("hybrid"), "hybrid:" + protect);
  EXPECT_EQ(replaced("snapkv:sinks=2"), "snapkv:" + protect);
  EXPECT_EQ(replaced("critical-kv:wo=none"), "critical-kv:wo=none," + protect);
  for (const char* policy : {"full", "local", "streaming-llm", "quest", "kivi", "simlayerkv", "oracle"})
    EXPECT_EQ(replaced(policy), policy) << "without protected tokens to replace";
  EXPECT_EQ(replaced("layers:0=full,1=(snapkv:window=2)"), "layers:0=full,1=(snapkv:window=2," + protect + ")");
  EXPECT_EQ(replaced("oracle:counts=snapkv"), "oracle:counts=(snapkv:" + protect + ")");
  EXPECT_EQ(refusal_of([&] { replaced("snapkv:protect=(sinks=1)"); }),
            "snapkv:protect: given more than once: expected one of protect=(...) and --protect, found --protect");

  const Plan plan = plan_of("pyramid-infer:protect=(sinks=2,recent=0.5)");
  EXPECT_EQ(plan.protect.within(20, 40, {}).recent, 10);
  ASSERT_TRUE(plan.observing);
  EXPECT_EQ(plan.observing->within(20, 40, {}).recent, 4) << "the window that scores is the policy's own";
  const Plan whole = plan_of("snapkv:protect=(sinks=4),select=chunks,chunk=16,window_mode=whole");
  EXPECT_EQ(whole.protect.sinks, 16) << "the whole page of the sinks";
}

TEST(Budget, RefusesInOneLine) {
  const auto refusal = [](const char* text) { return refusal_of([text] { Budget::parse(text); }); };
  EXPECT_EQ(refusal("0"), "budget 0: out of range: expected 1..2147483647, found 0");
  EXPECT_EQ(refusal("-3"), "budget -3: out of range: expected 1..2147483647, found -3");
  EXPECT_EQ(refusal("0.0"), "budget 0.0: out of range: expected a fraction in (0, 1], found 0.0");
  EXPECT_EQ(refusal("1.5"), "budget 1.5: out of range: expected a fraction in (0, 1], found 1.5");
  EXPECT_EQ(refusal("200%"), "budget 200%: out of range: expected a fraction in (0, 1], found 200%");
  EXPECT_EQ(refusal("99999999999"), "budget 99999999999: out of range: expected 1..2147483647, found 99999999999");
  EXPECT_EQ(refusal("12@seen"),
            "budget 12@seen: @seen needs a fraction: expected a fraction in (0, 1] of the tokens seen, as in 0.1@seen, "
            "found 12");
  EXPECT_EQ(refusal("@seen"), "budget: empty: expected a fraction in (0, 1] or a number of tokens, found @seen");
  EXPECT_EQ(
      refusal("1MiB@seen"),
      "budget 1MiB@seen: @seen needs a fraction: expected a fraction in (0, 1] of the tokens seen, as in 0.1@seen, "
      "found 1MiB");
  EXPECT_EQ(refusal("1MB"), "budget 1MB: unknown unit of memory: expected KiB, MiB or GiB, found 1MB");
  EXPECT_EQ(refusal("0KiB"), "budget 0KiB: out of range: expected 1 byte or more, found 0KiB");
  EXPECT_EQ(refusal("manyKiB"), "budget manyKiB: not a number: expected a number, found \"many\"");
  EXPECT_EQ(refusal("abc"),
            "budget abc: not a budget: expected a share (0.1 or 10%), a number of tokens (48) or bytes (1MiB), found "
            "abc");
  EXPECT_EQ(refusal(""), "budget: empty: expected a fraction in (0, 1] or a number of tokens");
}

TEST(Registry, DuplicateNameStopsTheProgram) {
  struct Named {
    std::string name;
  };
  EXPECT_DEATH(
      {
        Registry<Named> registry("policy");
        registry.add({"twice"});
        registry.add({"twice"});
      },
      "two things are registered as policy \"twice\"");
}

TEST(Registry, WhatComesLaterIsHeardAndGoesAgain) {
  struct Named {
    std::string name;
    int number = 0;
  };
  Registry<Named> registry("policy");
  registry.add({"old", 1});
  {
    std::vector<Registration> registrations;
    pending_registrations = &registrations;
    registry.add({"new", 2});
    registry.add({"old", 3});
    pending_registrations = nullptr;
    ASSERT_EQ(registrations.size(), 2U);
    EXPECT_EQ(registrations[0].kind, "policy");
    EXPECT_EQ(registrations[0].name, "new");
    EXPECT_FALSE(registrations[0].is_taken);
    EXPECT_TRUE(registrations[1].is_taken);
    EXPECT_EQ(registry.get("new").number, 2);
    EXPECT_EQ(registry.get("old").number, 1);
    for (const Registration& each : registrations) each.take_back();
  }
  EXPECT_EQ(registry.names(), std::vector<std::string>{"old"});
  registry.add({"new", 4});
  EXPECT_EQ(registry.get("new").number, 4);
}

TEST(Registry, NamesCanBeWrittenAnywhere) {
  for (const char* good : {"a", "h2o-online", "x-2"}) EXPECT_TRUE(is_name(good)) << good;
  for (const char* bad : {"", "A", "2nd", "-a", "a-", "a_b", "a,b", "a:b", "a b", "\u00e4"})
    EXPECT_FALSE(is_name(bad)) << bad;
  for (const std::string& name : policies().names()) EXPECT_TRUE(is_name(name)) << name;
}

TEST(Registry, EveryPolicyDescribesItselfAndItsParameters) {
  for (const std::string& name : policies().names()) {
    SCOPED_TRACE(name);
    const ConfiguredPolicy policy = ConfiguredPolicy::parse(name);
    EXPECT_STRNE(policy.card().summary, "");
    EXPECT_STRNE(policy.card().score, "");
    const Parameters parameters = policy.parameters();
    for (const Parameter& parameter : parameters.all()) {
      EXPECT_FALSE(parameter.help.empty()) << parameter.name;
      EXPECT_FALSE(parameter.range.empty()) << parameter.name;
      EXPECT_NO_THROW(parameter.set(parameter.default_text)) << parameter.name;
      EXPECT_EQ(parameter.text(), parameter.default_text) << parameter.name;
    }
    for (const Preset& preset : parameters.presets())
      EXPECT_NO_THROW(ConfiguredPolicy::parse(name + ":preset=" + preset.name));
  }
}

}  // namespace
}  // namespace kvreplay
