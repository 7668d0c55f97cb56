// Protected tokens of every registered policy that has them, under every schedule: kept in every row, within the
// budget. A new file joins by itself.

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>

#include "policies/plan_part.h"
#include "recorded_run.h"
#include "tests/table_file.h"

namespace kvreplay {
namespace {

constexpr int prompt = 40, budget = 15, sinks = 2, recent = 3;

const Trace& trace() {
  static const TemporaryTrace file([] {
    SynthOptions options = synth_defaults("gaussian");
    options.layers = 3;
    options.query_heads = 4;
    options.kv_heads = 2;
    options.head_dim = 8;
    options.prefill = prompt;
    options.continuation = 3;
    options.repeated = 20;
    return options;
  }());
  static const Trace opened = file.open();
  return opened;
}

/// With what a policy cannot do without.
std::string sized(const std::string& policy) {
  static const TemporaryFile table(npy(dictionary("<f8", "(3, 4)"), numbers<double>(std::vector<double>(12, 1.0))));
  if (policy == "dms") return policy + ":base=(knorm),threshold=-4,recent=4";
  if (policy == "head-kv") return policy + ":table=" + table.path() + ",window=4";
  if (policy == "critical-kv") return policy + ":wo=none";
  if (policy == "random-twin") return policy + ":of=(h2o)";
  if (policy == "finch") return policy + ":blocks=20,question=last,question_tokens=3";
  if (policy == "lagkv") return policy + ":lag=4";
  if (policy == "vase") return policy + ":window=4";
  if (policy == "h2o-online" || policy == "sca" || policy == "tri-attention") return policy + ":recent=4";
  return policy;
}

std::string with(const std::string& policy, const std::string& more) {
  return policy + (policy.find(':') == std::string::npos ? ":" : ",") + more;
}

bool accepted(const std::string& policy) {
  try {
    check_policy(trace(), default_conditions(trace()), ConfiguredPolicy::parse(policy), budget);
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// The policy under each schedule that it accepts.
std::vector<std::string> by_schedule(const std::string& policy) {
  std::vector<std::string> all{policy};
  for (const char* schedule :
       {"every(7)", "threshold(30,15)", "question-blocks(20),question=last,question_tokens=3", "online", "rolling"})
    if (const std::string text = with(policy, std::string("schedule=") + schedule); accepted(text)) all.push_back(text);
  return all;
}

bool protects(const Plan& plan) { return lacks_protection(plan).empty(); }

class ProtectedTokensOf : public testing::TestWithParam<std::string> {};

TEST_P(ProtectedTokensOf, AreKeptInEveryRowWithinTheBudget) {
  for (const std::string& policy : by_schedule(sized(GetParam()))) {
    const std::vector<LayerPlan> plans = ConfiguredPolicy::parse(policy).plans(3);
    for (const std::string& more :
         {std::string("sinks=2"), std::string("protect=(sinks=2,recent=3)"), std::string("protect=(recent=20%)")}) {
      SCOPED_TRACE(with(policy, more));
      const bool own = more == "sinks=2" && ConfiguredPolicy::parse(policy).parameters().find("sinks") != nullptr;
      if (!std::ranges::any_of(plans, protects, &LayerPlan::plan)) {
        if (own) continue;  // a rule's own
        EXPECT_THROW(ConfiguredPolicy::parse(with(policy, more)), Error) << "it has none";
        continue;
      }
      const bool replaces = more.starts_with("protect");
      const std::vector<Cell> cells{{ConfiguredPolicy::parse(with(policy, more)), budget}};
      RecordedRun run;
      replay(*tested_backend(2), trace(), default_conditions(trace()), cells, run);
      long kept = 0;
      for (const auto& [key, selection] : run.selections) {
        const KeptSet& set = selection.set;
        for (int row = 0; row < set.rows(); ++row) {
          const auto keeps = [&](int j) { return set.keeps(row, j); };
          kept += set.count(row) * 4L / set.rows();
          for (int j = 0; j < (more == "protect=(recent=20%)" ? 0 : sinks); ++j) EXPECT_TRUE(keeps(j)) << j;
          for (int j = prompt - (replaces ? recent : 0); j < prompt; ++j) EXPECT_TRUE(keeps(j)) << j;
        }
      }
      if (have_budget(plans)) {
        EXPECT_LE(kept, 3L * 4 * budget);
      }
    }
  }
}

/// A number of sinks is the same whichever parameter says it, also where the scores leave protected tokens out.
TEST_P(ProtectedTokensOf, AreTheSameInAPolicysOwnWords) {
  const std::string policy = sized(GetParam());
  // Its `sinks` also say whose queries do not count.
  if (policy == "expected-attention" || policy == "cap-kv" || policy.starts_with("critical-kv")) GTEST_SKIP();
  if (ConfiguredPolicy::parse(policy).parameters().find("sinks") == nullptr) GTEST_SKIP() << "it has none";
  for (const std::string& text : by_schedule(policy)) {
    for (const int number : {1, 5}) {
      const std::string own = with(text, "sinks=" + std::to_string(number));
      const std::vector<LayerPlan> plans = ConfiguredPolicy::parse(own).plans(3);
      const Protection& protect = plans.front().plan.protect;
      if (plans.size() > 1 || !protects(plans.front().plan) || protect.question.last_tokens > 0) continue;
      ASSERT_EQ(protect.sinks, number);
      const ProtectedTokens same{.sinks = protect.sinks, .recent = protect.recent};
      const std::string given = with(text, "protect=(" + same.text() + ")");
      SCOPED_TRACE(own + " and " + given);
      const RecordedRun run = record(trace(), {own, given}, budget);
      for (int layer = 0; layer < 3; ++layer)
        EXPECT_EQ(run.selections.at({0, layer}).set, run.selections.at({1, layer}).set);
    }
  }
}

/// The parameters that a results file has of a policy give the policy again, also where `protect` replaces its tokens.
TEST_P(ProtectedTokensOf, AreReadAgainFromCanonicalParameters) {
  const std::string policy = sized(GetParam());
  const ProtectedTokens tokens{.sinks = 4, .recent = Amount::tokens(3)};
  if (!protects(ConfiguredPolicy::parse(policy).plans(3).front().plan)) GTEST_SKIP() << "it has no protected tokens";
  std::vector<ConfiguredPolicy> written;
  written.push_back(ConfiguredPolicy::parse(with(policy, "protect=(" + tokens.text() + ")")));
  written.push_back(ConfiguredPolicy::parse(policy));
  written.back().replace_protected(tokens);
  for (const ConfiguredPolicy& one : written) {
    const std::string text = one.name() + ":" + one.params();
    SCOPED_TRACE(text);
    const ConfiguredPolicy again = ConfiguredPolicy::parse(text);
    EXPECT_EQ(again.params(), one.params());
    EXPECT_EQ(again.plans(3).front().plan.protect.sinks, one.plans(3).front().plan.protect.sinks);
  }
}

/// Policies that score by their last queries have the parameter window_at, unless these queries are the question.
TEST_P(ProtectedTokensOf, HaveAWindowThatCanEndWithTheQuestion) {
  const ConfiguredPolicy policy = ConfiguredPolicy::parse(sized(GetParam()));
  const bool by_last_queries = std::ranges::any_of(policy.plans(3), [](const LayerPlan& of_range) {
    const Plan& plan = of_range.plan;
    return (plan.score.needs.last_queries > 0 || plan.score.needs.recent_queries) &&
           plan.protect.question.last_tokens == 0;
  });
  EXPECT_EQ(policy.parameters().find("window_at") != nullptr, by_last_queries);
}

std::string test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name;
}

INSTANTIATE_TEST_SUITE_P(Registry, ProtectedTokensOf, testing::ValuesIn(policies().names()), test_name);

}  // namespace
}  // namespace kvreplay
