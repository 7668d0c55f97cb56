// Evictions while tokens come, on cases small enough to follow by hand, and what a query then sees.

#include <gtest/gtest.h>

#include <functional>

#include "fake_backend.h"
#include "policies/schedules/blocks.h"
#include "policies/schedules/schedules.h"
#include "policies/selection.h"
#include "policies/selectors/top_k.h"
#include "positions.h"

namespace kvreplay::testing {
namespace {

using Numbers = std::vector<std::int32_t>;

/// Blocks of two or more tokens, of which `keep` says how many stay.
class Blocks final : public BlockSchedule {
 public:
  struct Options {
    int block = 2;
    int spared = 0;
    std::function<int(const BlockEnd&)> keep = [](const BlockEnd& end) { return end.budget; };
    Slots slots = Slots::by_position;
  };
  explicit Blocks(Options options) : BlockSchedule(options.block, options.slots), options_(std::move(options)) {}

  std::string name() const override { return "blocks"; }
  int spared(int, MarkedQuestion) const override { return options_.spared; }

 private:
  Cut cut_at(const BlockEnd& end) const override { return {options_.keep(end), end.budget}; }

  Options options_;
};

SchedulePtr blocks(Blocks::Options options) { return std::make_shared<Blocks>(std::move(options)); }

SchedulePtr online(OnlineEvictions evictions = {}) { return evictions.schedule(); }

/// 2 query heads on 1 KV head, 8 + 4 tokens; scores are written by hand, one for each position.
class Schedules : public ::testing::Test {
 protected:
  Schedules() {
    plan.score.score = [this](const LayerView& held, const Scoring&) {
      Matrix scores(1, held.tokens());
      seen.push_back(held.residents().seen);
      for (int i = 0; i < held.tokens(); ++i)
        scores(0, i) = importance[static_cast<std::size_t>(held.positions(0)[i].number)];
      return scores;
    };
  }

  static LayerTensors twelve_tokens() {
    LayerTensors made;
    made.q = {nullptr, DType::float32, 2, 12, 4};
    made.k = made.v = {nullptr, DType::float32, 1, 12, 4};
    return made;
  }

  LayerSelection run(int budget) {
    return plan.schedule->run({view, plan, {budget, of_seen}, "policy", [this] { ++polls; }});
  }

  static std::string refusal(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      return std::to_string(error.exit_code()) + " " + error.what();
    }
    return "accepted";
  }

  std::vector<double> importance{5, 1, 9, 2, 8, 3, 7, 4, 6, 0, 0, 0};
  std::vector<int> seen;  // when scores were asked for
  int polls = 0;
  double of_seen = 0;
  FakeBackend backend;
  LayerTensors tensors = twelve_tokens();
  LayerView view{backend, tensors, {.prompt = 8}, {}};
  Plan plan;
};

TEST_F(Schedules, EveryBlockIsCutToTheBudget) {
  plan.schedule = after_every(3);
  const LayerSelection selection = run(3);
  // 0 1 2 | + 3 4 5: 2 4 0 stay | + 6 7: 2 4 6 stay.
  EXPECT_EQ(selection.evicted_at, (Numbers{7, 5, -1, 5, -1, 5, -1, 7, -1, -1, -1, -1}));
  EXPECT_EQ(selection.set.positions(0), (Numbers{2, 4, 6}));
  EXPECT_EQ(seen, (std::vector<int>{6, 8})) << "the first block fits";
  EXPECT_EQ(polls, 3) << "before each block";
  EXPECT_EQ(selection.granted, std::vector<int>{3});
}

TEST_F(Schedules, ABudgetOfWhatWasSeenGrowsBlockByBlock) {
  plan.schedule = after_every(2);
  of_seen = 0.5;
  // 0 1: 0 | + 2 3: 2 0 | + 4 5: 2 4 0 | + 6 7: 2 4 6 0.
  const LayerSelection selection = run(4);
  EXPECT_EQ(selection.evicted_at, (Numbers{-1, 1, -1, 3, -1, 5, -1, 7, -1, -1, -1, -1}));
  EXPECT_EQ(selection.set.positions(0), (Numbers{0, 2, 4, 6}));
  EXPECT_EQ(selection.granted, std::vector<int>{4});

  of_seen = 0.1;  // a token at least
  EXPECT_EQ(run(1).set.positions(0), (Numbers{2}));
}

TEST_F(Schedules, WhatStaysByRuleGrowsWithTheBudget) {
  plan.schedule = after_every(2);
  plan.score.reads_recent = true;
  plan.protect.recent = Amount::fraction(0.5);
  std::vector<int> recent;
  plan.score.score = [&](const LayerView& held, const Scoring& how) {
    recent.push_back(how.recent);
    return Matrix(1, held.tokens());
  };
  of_seen = 0.5;
  run(4);
  EXPECT_EQ(recent, (std::vector<int>{0, 1, 1, 2})) << "half of 1, 2, 3 and 4";
}

TEST_F(Schedules, AFirstTokenThatWentIsNoSinkAnyMore) {
  plan.schedule = after_every(2);
  plan.protect.sinks = 2;
  importance = {5, 1, 2.5, 2, 8, 3, 7, 4, 0, 0, 0, 0};
  of_seen = 0.5;
  // 0 1: 0, all that fits | + 2 3: 0, and 2 by its score | + 4 5: 0 4 5; 2 is the second that is held, and no sink.
  EXPECT_EQ(run(4).evicted_at, (Numbers{-1, 1, 5, 3, -1, 7, -1, -1, -1, -1, -1, -1}));
}

TEST_F(Schedules, BlocksSpareTheQuestionAndMayGrow) {
  plan.schedule = blocks({.spared = 2, .keep = [](const BlockEnd& end) {
                            EXPECT_EQ(end.budget, 3);
                            EXPECT_EQ(end.context, 6);
                            EXPECT_EQ(end.block, 2);
                            EXPECT_EQ(end.held, end.budget * (end.seen - 2) / end.context);
                            return end.budget * end.seen / end.context;
                          }});
  const LayerSelection selection = run(5);
  // 0 1: 0 | 0 2 3: 2 0 | 0 2 4 5: 2 4 0 | 6 7 stay.
  EXPECT_EQ(selection.evicted_at, (Numbers{-1, 1, -1, 3, -1, 5, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(selection.set.positions(0), (Numbers{0, 2, 4, 6, 7}));
  EXPECT_EQ(selection.recent, std::vector<int>{2});
  EXPECT_TRUE(selection.slots.empty());
}

TEST_F(Schedules, TokensThatStayByRuleFitIntoWhatIsHeld) {
  plan.protect.recent = Amount::tokens(4);
  plan.score.score = [](const LayerView& held, const Scoring& how) {
    EXPECT_LE(how.recent, held.tokens());
    return Matrix(1, held.tokens());
  };
  plan.schedule =
      blocks({.spared = 2, .keep = [](const BlockEnd& end) { return end.budget * end.seen / end.context; }});
  // 0 1: 1 | 1 2 3: 2 3 | 2 3 4 5: the last 3.
  EXPECT_EQ(run(5).set.positions(0), (Numbers{3, 4, 5, 6, 7}));
}

TEST_F(Schedules, TheProtectedRecentTokensScoreAlsoWhereABlockKeepsLess) {
  plan.protect.recent = Amount::fraction(0.5);
  plan.score.reads_recent = plan.score.needs.recent_queries = true;
  std::vector<int> recent, observing;
  plan.score.score = [&](const LayerView& held, const Scoring& how) {
    recent.push_back(how.recent);
    observing.push_back(how.observing);
    return Matrix(1, held.tokens());
  };
  plan.schedule = blocks({.keep = [](const BlockEnd& end) { return end.budget * end.seen / end.context; }});
  run(4);
  EXPECT_EQ(recent, (std::vector<int>{1, 2, 2, 2})) << "half of 4, within 1, 2, 3 and 4 kept tokens";
  EXPECT_EQ(observing, recent);
}

TEST_F(Schedules, HeldTokensTakeTheAttentionTheyHaveReceivedAlong) {
  LayerTensors two_kv_heads = twelve_tokens();
  two_kv_heads.k = two_kv_heads.v = {nullptr, DType::float32, 2, 12, 4};
  const LayerView both(backend, two_kv_heads, {.prompt = 8}, {});
  const auto received = [](std::initializer_list<double> by_token) {
    Matrix sums(2, static_cast<int>(by_token.size()));
    std::ranges::copy(by_token, sums.row(0).begin());
    std::ranges::transform(by_token, sums.row(1).begin(), [](double sum) { return 10 * sum; });
    return sums;
  };
  std::vector<std::vector<double>> before;
  plan.schedule = after_every(3);
  plan.score.accumulates = true;
  plan.score.score = [&](const LayerView& held, const Scoring&) {
    const std::span<const double> values = held.residents().attention_before.values();
    before.emplace_back(values.begin(), values.end());
    backend.sums = held.tokens() == 6 ? received({1, 2, 3, 4, 5, 6}) : received({0, 0, 0, 0, 0});
    Matrix scores(2, held.tokens());
    for (int i = 0; i < held.tokens(); ++i) {
      scores(0, i) = importance[static_cast<std::size_t>(held.positions(0)[i].number)];
      scores(1, i) = -importance[static_cast<std::size_t>(held.positions(1)[i].number)];
    }
    return scores;
  };
  backend.sums = received({5, 1, 9});
  plan.schedule->run({both, plan, {3}, "policy", [] {}});
  // 0 ... 5 have 6 3 12 4 5 6, tenfold in the second head; the first row goes on with 0 2 4, the second with 1 3 5.
  EXPECT_EQ(before, (std::vector<std::vector<double>>{{5, 1, 9, 50, 10, 90}, {6, 12, 5, 30, 40, 60}}));
}

TEST_F(Schedules, SlotsByRelevance) {
  plan.schedule = blocks({.block = 3, .spared = 1, .slots = BlockSchedule::Slots::by_relevance});
  const LayerSelection selection = run(4);
  // Context 0 ... 6, three slots: 0 1 2 -> 2 0 1 | + 3 4 5 -> 2 4 0 | + 6 -> 2 4 6; then the question 7.
  EXPECT_EQ(selection.set.positions(0), (Numbers{2, 4, 6, 7}));
  EXPECT_EQ(selection.slots, (Numbers{2, 4, 6, 7}));
  importance[6] = 10;
  seen.clear();
  EXPECT_EQ(run(4).slots, (Numbers{6, 2, 4, 7}));
}

TEST_F(Schedules, AQuestionAsLongAsTheBudgetIsRefused) {
  plan.schedule = blocks({.spared = 4});
  EXPECT_TRUE(refusal([&] { run(4); }).starts_with("3 policy: "));
  EXPECT_EQ(refusal([&] { run(5); }), "accepted");
}

TEST_F(Schedules, AThresholdCutsAlsoAfterThePrompt) {
  plan.schedule = Threshold{.peak = Amount::tokens(5), .keep = Amount::tokens(3)}.schedule();
  const LayerSelection selection = run(1);
  // t=4: 0 2 4 of 0-4 | t=6: 2 4 6 of 0 2 4 5 6 | t=8: 2 4 6 of + 7 8 | t=10: 2 4 6 of + 9 10 | 11 stays.
  EXPECT_EQ(selection.evicted_at, (Numbers{6, 4, -1, 4, -1, 6, -1, 8, 8, 10, 10, -1}));
  EXPECT_EQ(selection.set.positions(0), (Numbers{2, 4, 6, 7})) << "the prompt ends between two cuts";
  EXPECT_EQ(seen, (std::vector<int>{5, 7, 9, 11}));
}

TEST_F(Schedules, ThresholdsMayBeFractionsOfThePrompt) {
  EXPECT_EQ((Threshold{.peak = Amount::fraction(0.5), .keep = Amount::fraction(0.25)}).schedule()->held(80), 20);
  const auto check = [](Amount peak, Amount keep, int prompt) {
    return refusal(
        [&] { Threshold{.peak = peak, .keep = keep}.schedule()->check({.policy = "sca", .tokens = prompt}); });
  };
  EXPECT_EQ(check(Amount::tokens(8), Amount::fraction(0.5), 10), "accepted");
  EXPECT_EQ(check(Amount::tokens(2), Amount::tokens(4), 9),
            "2 sca: threshold(peak,keep): expected 1 <= keep < peak, found peak 2, keep 4");
  EXPECT_TRUE(check(Amount::tokens(4), Amount::tokens(4), 9).starts_with("2 "));
}

TEST_F(Schedules, RollingSeesSinksAndTheLastTokens) {
  plan.score = {};
  plan.schedule = rolling();
  plan.protect = {.sinks = 1, .recent = Amount::fraction(1.0)};
  const LayerSelection selection = run(4);
  EXPECT_EQ(selection.set.positions(0), (Numbers{0, 5, 6, 7}));
  EXPECT_EQ(selection.seen_by(7).positions(0), (Numbers{0, 5, 6, 7}));
  EXPECT_EQ(selection.seen_by(11).positions(0), (Numbers{0, 9, 10, 11}));
  EXPECT_EQ(selection.seen_by(2).positions(0), (Numbers{0, 1, 2}));
  EXPECT_EQ(selection.evicted_at, (Numbers{-1, 3, 4, 5, 6, 7, 8, 9, 10, -1, -1, -1}))
      << "after the last query none goes";
}

TEST_F(Schedules, OnlineAsksForAllTokensOrThePromptAlone) {
  plan.schedule = online();
  plan.score.online = OnlineScore::sum;
  plan.protect = {.recent = Amount::fraction(0.5), .least_recent = 1};
  backend.evicted = {8, -1, 4, -1, 6, 7, 9, -1, 10, -1, -1, -1};
  const LayerSelection selection = run(4);
  EXPECT_EQ(selection.evicted_at, backend.evicted);
  EXPECT_EQ(selection.set.positions(0), (Numbers{0, 1, 3, 6, 7})) << "0 goes after query 8";
  EXPECT_EQ(selection.recent, std::vector<int>{2});
  EXPECT_TRUE(seen.empty()) << "the backend keeps the scores";

  plan.schedule = online({.grow = true});
  backend.evicted.resize(8);
  for (std::int32_t& at : backend.evicted) at = at > 7 ? -1 : at;
  EXPECT_EQ(run(4).evicted_at, (Numbers{-1, -1, 4, -1, 6, 7, -1, -1, -1, -1, -1, -1}));
}

TEST_F(Schedules, AnOnlineBudgetOfWhatWasSeenGrowsTokenByToken) {
  plan.schedule = online();
  plan.score.accumulates = true;
  plan.protect = {.recent = Amount::fraction(0.5), .least_recent = 1};
  backend.evicted.assign(12, -1);
  run(4);
  EXPECT_TRUE(backend.asked_budgets.empty() && backend.asked_recents.empty());

  of_seen = 0.4;
  // floor(0.4 seen + 1/2), at least 1, for 1 ... 12 tokens seen; half of each.
  EXPECT_EQ(run(3).granted, std::vector<int>{3});
  EXPECT_EQ(backend.asked_budgets, (Numbers{1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 5}));
  EXPECT_EQ(backend.asked_recents, (Numbers{1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2}));

  plan.schedule = online({.grow = true});
  backend.evicted.resize(8);
  run(3);
  EXPECT_EQ(backend.asked_budgets, (Numbers{1, 1, 1, 2, 2, 2, 3, 3}));
}

TEST_F(Schedules, OnlineGoesOnFromThePromptCutOnce) {
  plan.schedule = online({.prefill = Prefill::once});
  plan.protect = {.recent = Amount::tokens(1)};
  backend.evicted = {-1, -1, 9, -1, -1, -1, -1, 8, -1, -1, -1, -1};
  const LayerSelection selection = run(4);
  // 2 4 6 by score, and 7.
  EXPECT_EQ(selection.set.positions(0), (Numbers{2, 4, 6, 7}));
  EXPECT_EQ(selection.evicted_at, (Numbers{7, 7, 9, 7, -1, 7, -1, 8, -1, -1, -1, -1}));
}

TEST(LayerSelection, AQueryThatEvictsATokenStillSeesIt) {
  LayerSelection selection{KeptSet(Heads::kv, 2, 3), {0, 0}, {0, 0}, {2, 2}};
  selection.evicted_at = {2,  -1, 2,  4,  -1,  //
                          -1, 1,  -1, -1, -1};
  EXPECT_TRUE(selection.changes_with_time());
  EXPECT_EQ(selection.seen_by(2).positions(0), (Numbers{0, 1, 2})) << "2 goes when it has attended";
  EXPECT_EQ(selection.seen_by(3).positions(0), (Numbers{1, 3}));
  EXPECT_EQ(selection.seen_by(4).positions(0), (Numbers{1, 3, 4}));
  EXPECT_EQ(selection.seen_by(1).positions(1), (Numbers{0, 1})) << "what comes later is not seen";
  EXPECT_EQ(selection.seen_by(4).positions(1), (Numbers{0, 2, 3, 4}));
  EXPECT_EQ(selection.seen_by(4).tokens(), 5);
  for (const int row : {0, 1}) hold_at_end_of_prompt(selection, row);
  EXPECT_EQ(selection.set.positions(0), (Numbers{1}));
  EXPECT_EQ(selection.set.positions(1), (Numbers{0, 2}));
}

TEST(LayerSelection, SlotsOfRowsStandOneAfterTheOther) {
  LayerSelection selection{KeptSet(Heads::kv, 3, 6), {0, 0, 0}, {0, 0, 0}, {2, 3, 1}};
  const std::vector<Numbers> slots{{4, 1}, {5, 0, 2}, {3}};
  for (int row = 0; row < 3; ++row)
    for (const std::int32_t position : slots[static_cast<std::size_t>(row)]) {
      selection.set.keep(row, position);
      selection.slots.push_back(position);
    }
  for (int row = 0; row < 3; ++row) {
    const std::span<const std::int32_t> of_row = selection.slots_of(row);
    EXPECT_EQ(Numbers(of_row.begin(), of_row.end()), slots[static_cast<std::size_t>(row)]) << "row " << row;
  }
}

TEST(ChooseRow, AnswersInPositionsWhateverTheOrderOfTheSlots) {
  const Numbers held{9, 2, 5, 7};
  const std::vector<double> scores{1, 4, 2, 3};
  EXPECT_EQ(choose_row(top_k(), held, scores, {2, {}}, nullptr, "p").positions, (Numbers{2, 7}));
  EXPECT_EQ(choose_row(top_k(), held, scores, {2, {.sinks = 0, .recent = 1}}, nullptr, "p").positions, (Numbers{2, 9}));
  EXPECT_EQ(choose_row(top_k(), held, scores, {9, {}}, nullptr, "p").positions, (Numbers{2, 5, 7, 9}));
  EXPECT_TRUE(choose_row(top_k(), held, scores, {0, {.sinks = 2}}, nullptr, "p").positions.empty());
}

TEST(ChooseRow, ABrokenSelectorIsABug) {
  const auto refusal = [](std::vector<std::int32_t> chosen) {
    const Selector broken{.select = [&](const Row&) { return Kept{chosen}; }};
    try {
      choose_row(broken, Numbers{0, 1, 2, 3}, {}, {2, {}}, nullptr, "mine");
    } catch (const Error& error) {
      EXPECT_EQ(error.refusal(), Refusal::internal);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refusal({1, 0}), "mine: selection not ascending among the resident tokens: expected 2..3, found 0");
  EXPECT_EQ(refusal({1, 1}), "mine: selection not ascending among the resident tokens: expected 2..3, found 1");
  EXPECT_EQ(refusal({4}), "mine: selection not ascending among the resident tokens: expected 0..3, found 4");
  EXPECT_EQ(refusal({0, 1, 2}), "mine: selection over its budget: expected at most 2, found 3");
  EXPECT_EQ(refusal({0, 3}), "accepted");
}

}  // namespace
}  // namespace kvreplay::testing
