// The random twin of every policy that has one: its counts, its protected tokens, its sharing. A new file joins by
// itself.

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>

#include "all_policies.h"
#include "policies/twin.h"
#include "recorded_run.h"
#include "tests/table_file.h"

namespace kvreplay {
namespace {

constexpr int layers = 3, prompt = 60;

/// Its first layer has a sliding window and is left as it is: stored and treated layers differ.
const Trace& trace() {
  static const TemporaryTrace file([] {
    SynthOptions options = synth_defaults("gaussian");
    options.layers = layers + 1;
    options.query_heads = 4;
    options.kv_heads = 2;
    options.head_dim = 16;
    options.prefill = prompt;
    options.continuation = 5;
    options.repeated = 40;
    options.sliding_window = {7, 0, 0, 0};
    return options;
  }());
  static const Trace opened = file.open();
  return opened;
}

/// With what a policy cannot do without.
std::string sized(const std::string& policy) {
  static const TemporaryFile table(
      npy(dictionary("<f8", "(3, 4)"), numbers<double>({4, 1, 2, 1, 1, 3, 1, 1, 2, 2, 1, 1})));
  if (policy == "dms") return policy + ":base=(knorm),threshold=-4,recent=4";
  if (policy == "head-kv") return policy + ":table=" + table.path() + ",window=4";
  if (policy == "critical-kv") return policy + ":wo=none";
  return policy;
}

std::string reason(const std::string& policy) { return ConfiguredPolicy::parse(policy).why_no_twin(layers); }

/// All that are registered, and many with other values: those that have a random twin, or the others.
std::vector<std::string> policies_that(bool have_a_twin) {
  std::vector<std::string> all = all_policies();
  for (const char* policy :
       {"head-kv", "critical-kv", "layers:0=full,1-2=(h2o:heads=query)", "chunkkv:reuse=2,window=3"})
    all.emplace_back(policy);
  std::erase_if(all, [have_a_twin](const std::string& policy) {
    try {
      return reason(sized(policy)).empty() != have_a_twin;
    } catch (const Error&) {
      return true;  // ranges of another number of layers
    }
  });
  return all;
}

std::string twin_of(const std::string& policy) { return "random-twin:of=(" + policy + ")"; }

bool fits(const std::string& policy, int budget) {
  try {
    check_policy(trace(), default_conditions(trace()), ConfiguredPolicy::parse(policy), budget);
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::string refusal_of(const std::string& policy) {
  try {
    ConfiguredPolicy::parse(policy).plans(layers);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

void expect_same(const LayerSelection& one, const LayerSelection& other) {
  EXPECT_EQ(one.set, other.set);
  EXPECT_EQ(one.sinks, other.sinks);
  EXPECT_EQ(one.recent, other.recent);
  EXPECT_EQ(one.granted, other.granted);
  EXPECT_EQ(one.source, other.source);
}

class RandomTwinOf : public testing::TestWithParam<std::string> {
 protected:
  std::string policy = sized(GetParam());

  /// Calls `check` with budgets that the policy fits.
  template <class Check>
  void on_budgets(Check check) {
    for (const int budget : {1, 3, 12, 25, 1000}) {
      SCOPED_TRACE("budget " + std::to_string(budget));
      ASSERT_EQ(fits(policy, budget), fits(twin_of(policy), budget));
      if (fits(policy, budget)) check(budget);
    }
  }
};

TEST_P(RandomTwinOf, KeepsAsManyTokensAndTheProtectedOnes) {
  on_budgets([&](int budget) {
    const RecordedRun run = record(trace(), {policy, twin_of(policy)}, budget);
    for (int l = 0; l < layers; ++l) {
      const LayerSelection& own = run.selections.at({0, l});
      const LayerSelection& twin = run.selections.at({1, l});
      EXPECT_EQ(twin.sinks, own.sinks);
      EXPECT_EQ(twin.recent, own.recent);
      EXPECT_EQ(twin.granted, own.granted);
      ASSERT_EQ(twin.set.heads(), own.set.heads());
      const int stored = default_conditions(trace()).layers[static_cast<std::size_t>(own.source)];
      for (int row = 0; row < own.set.rows(); ++row) {
        const auto r = static_cast<std::size_t>(row);
        ASSERT_EQ(twin.set.count(row), own.set.count(row));
        for (int j = 0; j < own.sinks[r]; ++j) EXPECT_TRUE(own.set.keeps(row, j) && twin.set.keeps(row, j)) << j;
        for (int j = prompt - own.recent[r]; j < prompt; ++j)
          EXPECT_TRUE(own.set.keeps(row, j) && twin.set.keeps(row, j)) << j;
        const Kept kept{own.set.positions(row), own.sinks[r], own.recent[r]};
        EXPECT_EQ(twin.set.positions(row), random_twin(kept, prompt, 0, stored, row)) << "layer " << l;
      }
    }
  });
}

TEST_P(RandomTwinOf, SharesSetsAsThePolicyDoes) {
  on_budgets([&](int budget) {
    const RecordedRun run = record(trace(), {policy, twin_of(policy)}, budget);
    for (int l = 0; l < layers; ++l) {
      const int source = run.selections.at({0, l}).source;
      EXPECT_EQ(run.selections.at({1, l}).source, source);
      EXPECT_EQ(run.selections.at({1, l}).set, run.selections.at({1, source}).set);
    }
  });
}

TEST_P(RandomTwinOf, IsTheSameTwiceAloneAndInCompany) {
  on_budgets([&](int budget) {
    const RecordedRun alone = record(trace(), {twin_of(policy)}, budget);
    const RecordedRun again = record(trace(), {twin_of(policy)}, budget, 3);
    const RecordedRun run = record(
        trace(), {"random", "snapkv:window=2,kernel=3", policy, twin_of("h2o"), "oracle", twin_of(policy)}, budget, 2);
    for (int l = 0; l < layers; ++l) {
      expect_same(alone.selections.at({0, l}), again.selections.at({0, l}));
      expect_same(alone.selections.at({0, l}), run.selections.at({5, l}));
      EXPECT_EQ(alone.stored.contains({0, l}), run.stored.contains({2, l})) << "the store is the policy's";
      for (std::size_t i = 0; i < alone.moments.at({0, l}).size(); ++i)
        EXPECT_EQ(alone.moments.at({0, l})[i].mass, run.moments.at({5, l})[i].mass);
    }
  });
}

/// Sets of an earlier run: the twin is of these.
TEST_P(RandomTwinOf, IsThatOfKnownSets) {
  on_budgets([&](int budget) {
    const RecordedRun first = record(trace(), {policy, twin_of(policy)}, budget);
    std::vector<Cell> cells{{ConfiguredPolicy::parse(policy), budget},
                            {ConfiguredPolicy::parse(twin_of(policy)), budget}};
    for (int l = 0; l < layers; ++l) cells[0].known.push_back(first.selections.at({0, l}));
    const RecordedRun second = record_cells(trace(), cells, 1);
    for (int l = 0; l < layers; ++l) expect_same(first.selections.at({1, l}), second.selections.at({1, l}));
  });
}

std::string test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name;
}

INSTANTIATE_TEST_SUITE_P(Registry, RandomTwinOf, testing::ValuesIn(policies_that(true)), test_name);

TEST(RandomTwins, OfTheOtherPoliciesAreRejectedWithTheReason) {
  const std::vector<std::string> others = policies_that(false);
  EXPECT_GT(others.size(), 30U);
  for (const std::string& policy : others)
    EXPECT_EQ(refusal_of(twin_of(policy)), "random-twin:of: " + reason(policy) +
                                               ": expected a one-shot policy (a static set), found " +
                                               ConfiguredPolicy::parse(policy).label_with_seeds());
}

TEST(RandomTwins, AreOtherSetsOfThoseThatChoose) {
  for (const char* policy :
       {"snapkv:window=3", "h2o", "chunkkv:window=3,chunk=4", "knorm", "strided", "sca", "pyramid-infer"}) {
    const RecordedRun run = record(trace(), {policy, twin_of(policy), twin_of(policy) + ",seed=1"}, 20);
    for (int l = 0; l < layers; ++l) {
      EXPECT_NE(run.selections.at({0, l}).set, run.selections.at({1, l}).set) << policy;
      EXPECT_NE(run.selections.at({1, l}).set, run.selections.at({2, l}).set) << policy;
    }
  }
  const RecordedRun rule = record(trace(), {"streaming-llm", twin_of("streaming-llm")}, 20);
  for (int l = 0; l < layers; ++l) EXPECT_EQ(rule.selections.at({0, l}).set, rule.selections.at({1, l}).set);
}

}  // namespace
}  // namespace kvreplay
