#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "analysis/measurement.h"
#include "analysis/self_check.h"
#include "fake_backend.h"

namespace kvreplay::testing {
namespace {

const Moments all{.mass = 1, .square = 0.4, .output_square = 2, .output_dot = 2};

TEST(SelfCheck, ASetThatKeepsEverythingIsExact) {
  EXPECT_FALSE(check_moments(all, all, true));
  Moments off = all;
  off.mass = std::nextafter(1.0, 0.0);
  const auto recall = check_moments(off, all, true);
  ASSERT_TRUE(recall);
  EXPECT_EQ(recall->law, Law::full);
  EXPECT_FALSE(check_moments(off, all, false));
  off = all;
  off.error_square = 1e-30;
  ASSERT_TRUE(check_moments(off, all, true));
  EXPECT_EQ(check_moments(off, all, true)->what, "output_error of the full cache");
}

TEST(SelfCheck, PartsDoNotExceedTheWhole) {
  Moments kept = all;
  kept.square = 0.41;
  const auto violation = check_moments(kept, all, false);
  ASSERT_TRUE(violation);
  EXPECT_EQ(violation->law, Law::identity);
  EXPECT_EQ(violation->what, "squares on kept keys");
  kept.square = std::nan("");
  EXPECT_TRUE(check_moments(kept, all, false));
}

/// Attention .5 .3 .2 of values (1,0) (0,1) (1,1); keys 0 and 2 kept.
const Moments full{.mass = 1, .square = 0.38, .output_square = 0.74, .output_dot = 0.74};
const Moments kept{.mass = 0.7,
                   .square = 0.29,
                   .output_square = 53.0 / 49,
                   .output_dot = 5.9 / 7,
                   .error_square = 0.09 + 0.045 / 0.98};
const Comparison compared{.all = {.dot = 2.9 / 7, .full_square = 0.38, .stored_square = 29.0 / 49},
                          .prompt = {},
                          .nosink = {},
                          .logits = {},
                          .l1 = 0.6,
                          .mass = 0.7,
                          .output_full_square = 0.74,
                          .output_square = 53.0 / 49,
                          .output_dot = 5.9 / 7,
                          .error_square = 0.09 + 0.045 / 0.98};

TEST(SelfCheck, BothPathsAgreeWithinTheTolerance) {
  EXPECT_FALSE(check_comparison(compared, kept, full));
  Comparison off = compared;
  off.l1 += 2 * path_tolerance;
  const auto violation = check_comparison(off, kept, full);
  ASSERT_TRUE(violation);
  EXPECT_EQ(violation->law, Law::identity);
  EXPECT_EQ(violation->what, "attention_l1 by comparison and by moments");
  off.l1 = 0.6 + path_tolerance / 2;
  EXPECT_FALSE(check_comparison(off, kept, full));
}

TEST(SelfCheck, ItsTolerancesGrowWithTheRoundingOfLargeLogits) {
  EXPECT_EQ(tolerance_at(path_tolerance, 40), path_tolerance) << "40 is rounded by less";
  for (const double largest : {500.0, 5'000.0, 16'000.0}) {
    SCOPED_TRACE(largest);
    const double path = tolerance_at(path_tolerance, largest), oracle = tolerance_at(oracle_tolerance, largest);
    EXPECT_EQ(path, 4 * 0x1p-24 * largest);
    Comparison off = compared;
    off.l1 += 0.9 * path;
    EXPECT_TRUE(check_comparison(off, kept, full)) << "of small logits";
    EXPECT_FALSE(check_comparison(off, kept, full, all_moments, largest));
    off.l1 = compared.l1 + 10 * path;
    EXPECT_TRUE(check_comparison(off, kept, full, all_moments, largest));
    EXPECT_TRUE(check_recall({0.7, 0.7}, 0.7 + 0.9 * oracle));
    EXPECT_FALSE(check_recall({0.7, 0.7}, 0.7 + 0.9 * oracle, largest));
    EXPECT_FALSE(check_recall({0.7, 0.8}, 0.7 + 0.9 * path, largest));
    EXPECT_TRUE(check_recall({0.7, 0.8}, 0.7 + 10 * path, largest));
    EXPECT_TRUE(check_recall({0.7, 0.7}, 0.7 + 10 * oracle, largest));
  }
}

TEST(SelfCheck, WhatIsNotANumberAgreesWithNothing) {
  Moments odd_kept = kept;
  Comparison odd = compared;
  odd_kept.error_square = odd.error_square = std::nan("");
  EXPECT_TRUE(check_comparison(odd, odd_kept, full));
  EXPECT_TRUE(check_moments(odd_kept, full, false));
  EXPECT_FALSE(check_moments(kept, full, false));
  odd_kept = kept;
  odd_kept.output_dot = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(check_moments(odd_kept, full, false));
  // Only o is zero: the relative error is infinite on both paths, or it is not the same.
  Moments no_output = full;
  odd = compared;
  no_output.output_square = odd.output_full_square = 0;
  EXPECT_FALSE(check_comparison(odd, kept, no_output));
  odd.output_full_square = 0.74;
  EXPECT_TRUE(check_comparison(odd, kept, no_output));
}

TEST(SelfCheck, OutputsNearDenormalNumbersAreNotCompared) {
  Moments small = full, kept_of_it = kept;
  Comparison other = compared;
  const auto scale_outputs = [&](double square) {
    small.output_square = full.output_square * square;
    kept_of_it.output_square = kept.output_square * square;
    kept_of_it.output_dot = kept.output_dot * square;
    kept_of_it.error_square = kept.error_square * square * 1.01;  // rounded
    other.output_full_square = compared.output_full_square * square;
    other.output_dot = compared.output_dot * square;
    other.output_square = compared.output_square * square;
    other.error_square = compared.error_square * square;
  };
  scale_outputs(1e-80);
  EXPECT_FALSE(check_comparison(other, kept_of_it, small));
  scale_outputs(1e-60);
  EXPECT_TRUE(check_comparison(other, kept_of_it, small));
}

TEST(SelfCheck, LogitsOfRoundingAloneAreNotCompared) {
  Moments rounded = full, kept_of_it = kept;
  rounded.logit_square = kept_of_it.logit_square = 1e-16;  // 0 by the comparison
  EXPECT_FALSE(check_comparison(compared, kept_of_it, rounded));
  rounded.logit_square = kept_of_it.logit_square = 1e-4;
  EXPECT_TRUE(check_comparison(compared, kept_of_it, rounded));
}

TEST(SelfCheck, WhatTheMomentsWereNotAskedForIsNotCompared) {
  Moments attention = kept, all_attention = full;
  attention.output_square = attention.output_dot = attention.error_square = all_attention.output_square = 0;
  EXPECT_TRUE(check_comparison(compared, attention, all_attention));
  EXPECT_FALSE(check_comparison(compared, attention, all_attention, {.logits = true}));
  EXPECT_TRUE(check_comparison(compared, attention, all_attention, {.outputs = true}));
  Comparison off = compared;
  off.l1 = 0;
  EXPECT_TRUE(check_comparison(off, attention, all_attention, {}));
}

TEST(Wanted, ReadsOfTheMomentsWhatItsMetricsRead) {
  const auto parts = [](const char* metrics) { return Wanted{.metrics = parse_metrics(metrics)}.moments(); };
  EXPECT_FALSE(parts("kv_l1_loss,jaccard_adjacent,layer_budget"));
  EXPECT_FALSE(parts("attention_cosine:rows"));
  const auto attention = parts("attention_recall,attention_l1,attention_cosine:prompt,kv_l1_loss");
  ASSERT_TRUE(attention);
  EXPECT_FALSE(attention->outputs || attention->logits || attention->unaligned);
  EXPECT_TRUE(parts("attention_recall,output_error")->outputs);
  EXPECT_TRUE(parts("output_cosine")->outputs);
  EXPECT_TRUE(parts("attention_cosine:logits")->logits);
  EXPECT_TRUE(parts("attention_cosine:unaligned")->unaligned);
  EXPECT_FALSE(parts("attention_cosine:unaligned")->logits);
  const Wanted rows{.metrics = parse_metrics("attention_cosine:rows")};
  ASSERT_TRUE(rows.moments_of_all_queries());
  EXPECT_FALSE(rows.moments_of_all_queries()->outputs);
}

TEST(SelfCheck, ExpectedRecallByHand) {
  // 2 query heads share one KV head; 3 prompt tokens, 2 eval queries. Column sums over the group: .6 .9 .3, so of the
  // 4 pairs' mass 4 - 1.8 = 2.2 lies where nothing is evicted.
  FakeBackend backend;
  LayerTensors tensors;
  tensors.q = {nullptr, DType::float32, 2, 5, 4};
  tensors.k = tensors.v = {nullptr, DType::float32, 1, 5, 4};
  backend.sums = Matrix(2, 3);
  const double sums[2][3] = {{0.1, 0.8, 0.2}, {0.5, 0.1, 0.1}};
  for (int h = 0; h < 2; ++h)
    for (int j = 0; j < 3; ++j) backend.sums(h, j) = sums[h][j];
  const std::vector<std::int32_t> eval{3, 4};
  const LayerView view(backend, tensors, {.layer = 0, .layers = 1, .stored_layer = 0, .prompt = 3}, eval);
  KeptSet set(Heads::kv, 1, 3);
  set.keep(0, 0);
  const std::vector<ExpectedRecall> rows = RecallByAttention(view).of(set);
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_DOUBLE_EQ(rows[0].of_set, (2.2 + 0.6) / 4);
  EXPECT_DOUBLE_EQ(rows[0].of_oracle, (2.2 + 0.9) / 4);

  KeptSet by_query(Heads::query, 2, 3);
  by_query.keep(1, 1);
  by_query.keep(1, 2);
  const std::vector<ExpectedRecall> queries = RecallByAttention(view).of(by_query);
  ASSERT_EQ(queries.size(), 2U);
  EXPECT_DOUBLE_EQ(queries[0].of_set, (2 - 1.1) / 2);
  EXPECT_DOUBLE_EQ(queries[1].of_set, (2 - 0.7 + 0.2) / 2);
  EXPECT_DOUBLE_EQ(queries[1].of_oracle, (2 - 0.7 + 0.6) / 2);

  // Of one token for both query heads, the best is 1: its attention in each of them.
  const std::vector<double> of_best = RecallByAttention(view).of_best_set(set);
  ASSERT_EQ(of_best.size(), 2U);
  EXPECT_DOUBLE_EQ(of_best[0], (2 - 1.1 + 0.8) / 2);
  EXPECT_DOUBLE_EQ(of_best[1], (2 - 0.7 + 0.1) / 2);
  EXPECT_DOUBLE_EQ((of_best[0] + of_best[1]) / 2, rows[0].of_oracle);
  const std::vector<double> of_each = RecallByAttention(view).of_best_set(by_query);
  EXPECT_DOUBLE_EQ(of_each[0], (2 - 1.1) / 2);
  EXPECT_DOUBLE_EQ(of_each[1], (2 - 0.7 + 0.6) / 2);
  KeptSet whole(Heads::kv, 1, 3);
  whole.keep(0, 0, 3);
  EXPECT_EQ(RecallByAttention(view).of_best_set(whole), (std::vector<double>{1, 1}));
}

TEST(SelfCheck, NothingRecallsMoreThanItsOracle) {
  EXPECT_FALSE(check_recall({0.7, 0.8}, 0.7));
  EXPECT_EQ(check_recall({0.7, 0.8}, 0.75)->law, Law::identity);
  EXPECT_EQ(check_recall({0.8, 0.8}, 0.8 + 5e-6)->law, Law::oracle);
  EXPECT_FALSE(check_recall({0.8, 0.8}, 0.8 + 5e-7));
  EXPECT_TRUE(check_recall({0.8, 0.8}, std::nan("")));
}

TEST(SelfCheck, SlotsAreCountedOverAllLayers) {
  LayerSelection rich{KeptSet(Heads::kv, 2, 8), {0, 0}, {0, 0}, {0, 0}, 0}, poor = rich;
  for (int j = 0; j < 5; ++j) rich.set.keep(0, j);
  for (int j = 0; j < 3; ++j) poor.set.keep(1, j);
  EXPECT_FALSE(check_budget(std::vector{rich, poor}, 2));
  poor.set.keep(0, 7);
  const auto violation = check_budget(std::vector{rich, poor}, 2);
  ASSERT_TRUE(violation);
  EXPECT_EQ(violation->text(), "kept slots: expected at most 8, found 9");
}

TEST(SelfCheck, AViolationSaysWhere) {
  const Violation violation{Law::full, 3, 1, "attention_l1", "0", "0.25"};
  EXPECT_EQ(violation.text(), "layer 3, head 1: attention_l1: expected 0, found 0.25");
}

}  // namespace
}  // namespace kvreplay::testing
