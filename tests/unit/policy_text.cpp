// Policies, parameters and budgets as users write them.

#include <gtest/gtest.h>

#include "policies/configured.h"

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
  return refusal_of([&] { ConfiguredPolicy::parse(text); });
}

TEST(SplitPolicies, PieceWithValueBelongsToThePolicyBeforeIt) {
  using Pieces = std::vector<std::string>;
  EXPECT_EQ(split_policies("h2o,snapkv:window=32,pool=avg,random"),
            (Pieces{"h2o", "snapkv:window=32,pool=avg", "random"}));
  EXPECT_EQ(split_policies("h2o,recent=3"), (Pieces{"h2o:recent=3"}));
  EXPECT_EQ(split_policies("oracle:counts=(snapkv:window=2,kernel=3),local"),
            (Pieces{"oracle:counts=(snapkv:window=2,kernel=3)", "local"}));
  EXPECT_EQ(refusal_of([] { split_policies("window=3"); }),
            "policy: value without a policy: expected NAME[:KEY=VALUE,...], found window=3");
  EXPECT_EQ(refusal_of([] { split_policies("h2o,,local"); }), "policy: empty piece of a list: found \"h2o,,local\"");
  EXPECT_EQ(refusal_of([] { split_policies(""); }), "policy: empty piece of a list: found \"\"");
  EXPECT_EQ(refusal_of([] { split_policies("oracle:counts=(h2o"); }),
            "policy: parentheses do not match: found \"oracle:counts=(h2o\"");
  EXPECT_EQ(refusal_of([] { split_policies("h2o)"); }), "policy: parentheses do not match: found \"h2o)\"");
}

TEST(ConfiguredPolicy, LabelNamesWhatDiffersAndParamsNameAll) {
  EXPECT_EQ(ConfiguredPolicy::parse("snapkv").label(), "snapkv");
  EXPECT_EQ(ConfiguredPolicy::parse("snapkv:kernel=5,window=8").label(), "snapkv:kernel=5");
  EXPECT_EQ(ConfiguredPolicy::parse("h2o").params(), "recent=0.5,heads=kv,agg=mean,overlap=false");
  EXPECT_EQ(ConfiguredPolicy::parse("h2o:recent=25%").params(), "recent=0.25,heads=kv,agg=mean,overlap=false");
  EXPECT_EQ(ConfiguredPolicy::parse("oracle:counts=(snapkv:window=8,kernel=5)").params(),
            "heads=kv,agg=mean,scope=head,counts=(snapkv:kernel=5)");
  const std::string label = ConfiguredPolicy::parse("oracle:counts=(snapkv:kernel=5)").label();
  EXPECT_EQ(ConfiguredPolicy::parse(label).params(),
            ConfiguredPolicy::parse("oracle:counts=(snapkv:kernel=5)").params());
}

TEST(ConfiguredPolicy, PresetComesFirstAndValuesOverrideIt) {
  EXPECT_EQ(ConfiguredPolicy::parse("snapkv:window=16,preset=kvpress").label(), "snapkv:window=16,kernel=5,pool=avg");
  EXPECT_EQ(ConfiguredPolicy::parse("snapkv:preset=factory").label(), "snapkv");
  EXPECT_EQ(ConfiguredPolicy::parse("h2o:preset=factory").label(), "h2o:recent=8");
}

TEST(ConfiguredPolicy, SeedIsTheDefaultOfSeedParameters) {
  EXPECT_EQ(ConfiguredPolicy::parse("random", 7).label(), "random:seed=7");
  EXPECT_EQ(ConfiguredPolicy::parse("random:seed=0", 7).label(), "random");
}

TEST(ConfiguredPolicy, RefusesInOneLine) {
  EXPECT_EQ(refusal_of_policy("snapvk"), "snapvk: unknown policy: expected snapkv, found snapvk");
  EXPECT_EQ(refusal_of_policy("snapkv:windw=3"), "snapkv: unknown parameter: expected window, found windw");
  EXPECT_EQ(refusal_of_policy("snapkv:window"), "snapkv: not a parameter: expected KEY=VALUE, found \"window\"");
  EXPECT_EQ(refusal_of_policy("snapkv:window=3,window=4"), "snapkv: given twice: found window");
  EXPECT_EQ(refusal_of_policy("snapkv:window=0"), "snapkv:window: out of range: expected 1.., found 0");
  EXPECT_EQ(refusal_of_policy("snapkv:kernel=4"), "snapkv:kernel: out of range: expected 1.., odd, found 4");
  EXPECT_EQ(refusal_of_policy("snapkv:window=3x"),
            "snapkv:window: not a number: expected a whole number, found \"3x\"");
  EXPECT_EQ(refusal_of_policy("snapkv:window="), "snapkv:window: not a number: expected a whole number, found \"\"");
  EXPECT_EQ(refusal_of_policy("snapkv:pool=mx"),
            "snapkv:pool: unknown value: expected one of none, max, avg, found \"mx\"");
  EXPECT_EQ(
      refusal_of_policy("snapkv:preset=factry"),
      "snapkv:preset: unknown value: expected one of factory, snapkv-paper, snapkv-code, kvpress, found \"factry\"");
  EXPECT_EQ(refusal_of_policy("snapkv:windw=3,"), "snapkv: empty piece of a list: found \"windw=3,\"");
  EXPECT_EQ(refusal_of_policy("h2o:recent=1.5"),
            "h2o:recent: out of range: expected tokens, or a fraction 0.0..1.0, found 1.5");
  EXPECT_EQ(refusal_of_policy("h2o:recent=-3"), "h2o:recent: out of range: expected 0 or more, found -3");
  EXPECT_EQ(refusal_of_policy("h2o:overlap=yes"),
            "h2o:overlap: not a truth value: expected false or true, found \"yes\"");
  EXPECT_EQ(refusal_of_policy("local:recent=3"), "local: takes no parameters: found recent");
  EXPECT_EQ(refusal_of_policy("random:heads=query"),
            "random:heads: unknown value: expected one of kv, layer, found \"query\"");
  EXPECT_EQ(refusal_of_policy("oracle:counts=(oracle:counts=h2o)"),
            "oracle:counts: counts of counts: expected a policy with counts of its own, found oracle:counts=h2o");
}

TEST(ConfiguredPolicy, OracleTakesCountsFromAPolicyThatHasSome) {
  EXPECT_EQ(refusal_of_policy("oracle:counts=(full)"),
            "oracle:counts: counts of a policy without a budget: expected a policy that evicts, found full");
  EXPECT_EQ(
      refusal_of_policy("oracle:scope=global,counts=(h2o)"),
      "oracle: heads and scope come from the counted policy: expected counts without heads and scope, found heads "
      "or scope beside counts=(h2o)");
}

TEST(ConfiguredPolicy, ValueOfTheUserMustFitTheTraceAndADefaultIsClamped) {
  EXPECT_EQ(refusal_of([] { ConfiguredPolicy::parse("streaming-llm:sinks=9").check_limits(8, 2); }),
            "streaming-llm:sinks: larger than the trace: expected at most 8 tokens, found 9");
  EXPECT_EQ(refusal_of([] { ConfiguredPolicy::parse("chunkkv:reuse=3").check_limits(8, 2); }),
            "chunkkv:reuse: larger than the trace: expected at most 2 layers, found 3");
  EXPECT_EQ(refusal_of([] { ConfiguredPolicy::parse("h2o:recent=9").check_limits(8, 2); }),
            "h2o:recent: larger than the trace: expected at most 8 tokens, found 9");
  EXPECT_NO_THROW(ConfiguredPolicy::parse("streaming-llm").check_limits(2, 1));
}

TEST(Budget, LiteralWithAPointIsAFraction) {
  EXPECT_EQ(Budget::parse("0.1").tokens(480), 48);
  EXPECT_EQ(Budget::parse("10%").tokens(480), 48);
  EXPECT_EQ(Budget::parse("0.1").tokens(5), 1);    // floor(0.5 + 0.5)
  EXPECT_EQ(Budget::parse("0.1").tokens(14), 1);   // floor(1.4 + 0.5)
  EXPECT_EQ(Budget::parse("0.1").tokens(15), 2);   // floor(1.5 + 0.5)
  EXPECT_EQ(Budget::parse("0.01").tokens(12), 1);  // at least one
  EXPECT_EQ(Budget::parse("1.0").tokens(12), 12);
  EXPECT_EQ(Budget::parse("1").tokens(12), 1);
  EXPECT_EQ(Budget::parse("512").tokens(12), 512);
}

TEST(Budget, RefusesInOneLine) {
  const auto refusal = [](const char* text) { return refusal_of([text] { Budget::parse(text); }); };
  EXPECT_EQ(refusal("0"), "budget 0: out of range: expected 1..2147483647, found 0");
  EXPECT_EQ(refusal("-3"), "budget -3: out of range: expected 1..2147483647, found -3");
  EXPECT_EQ(refusal("0.0"), "budget 0.0: out of range: expected a fraction in (0, 1], found 0.0");
  EXPECT_EQ(refusal("1.5"), "budget 1.5: out of range: expected a fraction in (0, 1], found 1.5");
  EXPECT_EQ(refusal("200%"), "budget 200%: out of range: expected a fraction in (0, 1], found 200%");
  EXPECT_EQ(refusal("99999999999"), "budget 99999999999: out of range: expected 1..2147483647, found 99999999999");
  EXPECT_EQ(refusal("abc"), "budget abc: not a number: expected a whole number, found \"abc\"");
  EXPECT_EQ(refusal(""), "budget: empty: expected a fraction in (0, 1] or a count of tokens");
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
