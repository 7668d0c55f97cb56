// The permutation of a row by hand, and the policies that have a random twin.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "policies/text/configured.h"
#include "policies/twin.h"
#include "random.h"

namespace kvreplay {
namespace {

using Positions = std::vector<std::int32_t>;

/// 2 sinks, 3 recent tokens of 19: runs {4, 5}, {8}, {10, 11, 12} between gaps of 2, 2, 1 and 3 tokens.
const Kept row{{0, 1, 4, 5, 8, 10, 11, 12, 16, 17, 18}, 2, 3};

TEST(RandomTwinOfARow, IsThePermutationByHand) {
  // chain(7, 5, 1, i) = 7d45..., 6ed9..., 73a3...: runs 1, 2, 0, of 1, 3 and 2 tokens.
  ASSERT_LT(chain(7, 5, 1, 1), chain(7, 5, 1, 2));
  ASSERT_LT(chain(7, 5, 1, 2), chain(7, 5, 1, 0));
  ASSERT_EQ(chain(7, 5, 1, 0), 0x7D4563D2C2AFC5F8U);
  // chain(7, 5, 1, i, 1) = d4fe..., c12f..., 48c3..., af4d...: gaps 2, 3, 1, 0, of 1, 3, 2 and 2 tokens.
  ASSERT_EQ(chain(7, 5, 1, 2, 1), 0x48C31B06206B45FBU);
  EXPECT_EQ(random_twin(row, 19, 7, 5, 1), (Positions{0, 1, 3, 7, 8, 9, 12, 13, 16, 17, 18}));
}

TEST(RandomTwinOfARow, DependsOnSeedLayerAndRow) {
  // Of seed 0: runs 1, 0, 2, of 1, 2 and 3 tokens; gaps 2, 1, 3, 0, of 1, 2, 3 and 2.
  EXPECT_EQ(random_twin(row, 19, 0, 5, 1), (Positions{0, 1, 3, 6, 7, 11, 12, 13, 16, 17, 18}));
  // Of layer 2 and seed 3: runs 2, 0, 1, of 3, 2 and 1 tokens; gaps 1, 3, 2, 0, of 2, 3, 1 and 2.
  EXPECT_EQ(random_twin(row, 19, 3, 2, 1), (Positions{0, 1, 4, 5, 6, 10, 11, 13, 16, 17, 18}));
  EXPECT_NE(random_twin(row, 19, 7, 5, 1), random_twin(row, 19, 7, 5, 2));
}

TEST(RandomTwinOfARow, RunsThatMeetBecomeOne) {
  // An empty first gap comes second: gaps 1, 0, 2 of 2, 0 and 1 tokens, runs in their own order.
  EXPECT_EQ(random_twin({{0, 1, 4, 5, 6}}, 8, 0, 0, 0), (Positions{2, 3, 4, 5, 6}));
}

TEST(RandomTwinOfARow, StaysWhereNothingCanBePermuted) {
  Positions all(9);
  std::iota(all.begin(), all.end(), 0);
  for (const std::uint64_t seed : {0U, 1U, 2U, 3U}) {
    EXPECT_EQ(random_twin({all, 0, 0}, 9, seed, 0, 0), all) << "one run without a free place";
    EXPECT_EQ(random_twin({all, 2, 3}, 9, seed, 0, 0), all);
    EXPECT_EQ(random_twin({{0, 1, 7, 8}, 2, 2}, 9, seed, 0, 0), (Positions{0, 1, 7, 8})) << "no run";
    EXPECT_EQ(random_twin({}, 9, seed, 0, 0), Positions{});
  }
}

TEST(RandomTwinOfARow, HasTheSameCountsAndTheSameProtectedTokens) {
  for (int layer = 0; layer < 50; ++layer) {
    const Positions twin = random_twin(row, 19, 1, layer, 0);
    ASSERT_EQ(twin.size(), row.positions.size());
    EXPECT_TRUE(std::ranges::adjacent_find(twin, std::greater_equal{}) == twin.end());
    EXPECT_EQ(Positions(twin.begin(), twin.begin() + 2), (Positions{0, 1}));
    EXPECT_EQ(Positions(twin.end() - 3, twin.end()), (Positions{16, 17, 18}));
  }
}

std::string reason(const std::string& policy, int layers = 4) {
  return ConfiguredPolicy::parse(policy).why_no_twin(layers);
}

TEST(RandomTwin, ExistsForStaticSetsWithinABudget) {
  for (const char* policy :
       {"snapkv", "h2o", "chunkkv:reuse=2", "streaming-llm", "strided", "pyramid-infer", "dynamickv", "sca", "hybrid",
        "h2o:store=quantised", "layers:0-1=full,2-3=(h2o)", "layers:0=(snapkv),1-3=(chunkkv)"})
    EXPECT_EQ(reason(policy), "") << policy;
}

TEST(RandomTwin, IsRejectedWithItsReason) {
  for (const char* policy : {"full", "random", "oracle", "oracle:counts=(h2o)", "random-twin:of=(h2o)"})
    EXPECT_EQ(reason(policy), "is a control itself") << policy;
  EXPECT_EQ(reason("kivi"), "keeps every token");
  EXPECT_EQ(reason("layers:0-1=full,2-3=(minicache)"), "keeps every token");
  EXPECT_EQ(reason("quest"), "reads a different set for each query");
  EXPECT_EQ(reason("layers:0-1=(h2o),2-3=(quest:dense_layers=0)"), "reads a different set for each query");
  for (const char* policy : {"h2o-online", "snapkv:schedule=every(16)", "h2o:schedule=threshold(0.5,0.3)", "finch",
                             "streaming-llm:rolling=true"})
    EXPECT_EQ(reason(policy), "has a dynamic kept set") << policy;
  for (const char* policy : {"duo-attention", "simlayerkv", "pyramid-infer:lengths=natural"})
    EXPECT_EQ(reason(policy), "ignores the budget") << policy;
}

std::string refusal_of(const std::string& text, int layers = 4) {
  try {
    ConfiguredPolicy::parse(text).plans(layers);
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::usage) << text;
    return error.what();
  }
  return "accepted";
}

TEST(RandomTwin, NamesWhatItsPolicyLacks) {
  EXPECT_EQ(refusal_of("random-twin"), "random-twin:of: no policy: expected (POLICY), as in of=(snapkv), found none");
  EXPECT_EQ(refusal_of("random-twin:of=(h2o-online)"),
            "random-twin:of: has a dynamic kept set: expected a one-shot policy (a static set), found h2o-online");
  EXPECT_EQ(refusal_of("random-twin:of=(h2o),select=chunks"),
            "random-twin: takes its plan from of=(POLICY): expected the part inside of=(POLICY), found chunks outside "
            "of=(h2o)");
  EXPECT_EQ(
      refusal_of("layers:0-1=(random-twin:of=(h2o)),2-3=h2o"),
      "layers:0-1: the policy copies counts or sets of another policy: expected a policy that does not use another "
      "policy's counts or sets, found random-twin:of=h2o,seed=0");
  EXPECT_EQ(refusal_of("oracle:counts=(random-twin:of=(h2o))"),
            "oracle:counts: the policy takes its own counts from another policy: expected a policy that does not use "
            "another policy's counts, found random-twin:of=h2o,seed=0");
}

TEST(RandomTwin, HasTheSeedsOfItsPolicyInItsLabel) {
  EXPECT_EQ(ConfiguredPolicy::parse("random-twin:of=(snapkv:window=16)").label(), "random-twin:of=(snapkv:window=16)");
  const ConfiguredPolicy of_nacl = ConfiguredPolicy::parse("random-twin:of=(nacl)", 3);
  EXPECT_EQ(of_nacl.params(), "of=(nacl:seed=3),seed=3");
  EXPECT_EQ(ConfiguredPolicy::parse("random-twin:of=(nacl),seed=5", 3).params(), "of=(nacl:seed=3),seed=5");
}

TEST(RandomTwin, HasThePlanOfItsPolicyInAllButTheSets) {
  const std::vector<LayerPlan> plans = ConfiguredPolicy::parse("random-twin:of=(pyramid-infer:recent=3)").plans(4);
  ASSERT_EQ(plans.size(), 1U);
  const Plan of_policy = ConfiguredPolicy::parse("pyramid-infer:recent=3").plans(4).front().plan;
  const Plan& plan = plans.front().plan;
  EXPECT_EQ(of_policy.nesting, Nesting::within_previous);
  EXPECT_EQ(plan.nesting, Nesting::none);
  EXPECT_EQ(plan.grouping.heads, of_policy.grouping.heads);
  EXPECT_EQ(plan.protect.recent.count, of_policy.protect.recent.count);
  EXPECT_TRUE(has_budget(plan));
  EXPECT_FALSE(plan.score);
  ASSERT_TRUE(plan.allocate->changes_sets());
  EXPECT_EQ(plan.allocate->other->label_with_seeds(), "pyramid-infer:recent=3");
  EXPECT_EQ(plan.allocate->changed(row, 19, 0, 1), random_twin(row, 19, 0, 0, 1));
}

}  // namespace
}  // namespace kvreplay
