#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "analysis/measurement.h"
#include "analysis/metrics/metric.h"
#include "fake_backend.h"

namespace kvreplay::testing {
namespace {

template <class Of>
Of measure(const std::string& metric, const std::string& variant = "") {
  const MetricVariant* found = find_variant({metric, variant});
  EXPECT_NE(found, nullptr) << metric << ":" << variant;
  return std::get<Of>(found->measure);
}

/// One query that sees keys 0, 1, 2 with attention .5 .3 .2 and values (1,0) (0,1) (1,1); 0 and 2 are kept.
const Moments full_moments{.mass = 1,
                           .square = 0.38,
                           .prompt_mass = 1,
                           .prompt_square = 0.38,
                           .output_square = 0.74,
                           .output_dot = 0.74,
                           .logit_square = 9,
                           .unaligned_dot = 0.38};
const Moments kept_moments{.mass = 0.7,
                           .square = 0.29,
                           .prompt_mass = 0.7,
                           .prompt_square = 0.29,
                           .output_square = 53.0 / 49,
                           .output_dot = 5.9 / 7,
                           .error_square = 0.09 + 0.045 / 0.98,
                           .logit_square = 4,
                           .unaligned_dot = 0.5 * 0.5 + 0.3 * 0.2};
/// The same with the renormalised attention 5/7, 0, 2/7 written out.
const Comparison compared{.all = {.dot = 2.9 / 7, .full_square = 0.38, .stored_square = 29.0 / 49},
                          .prompt = {.dot = 2.9 / 7, .full_square = 0.38, .stored_square = 29.0 / 49},
                          .nosink = {.dot = 0.04 / 7, .full_square = 0.13, .stored_square = 4.0 / 49},
                          .logits = {.dot = 4, .full_square = 9, .stored_square = 4},
                          .l1 = 1.5 / 7 + 0.3 + 0.6 / 7,
                          .mass = 0.7,
                          .output_full_square = 0.74,
                          .output_square = 53.0 / 49,
                          .output_dot = 5.9 / 7,
                          .error_square = 0.09 + 0.045 / 0.98};

double from_moments(const std::string& metric, const std::string& variant = "") {
  return measure<OfMoments>(metric, variant).from_moments(kept_moments, full_moments);
}

TEST(MetricCards, AVariantMayHaveADirectionOfItsOwn) {
  EXPECT_EQ(better_of({"kv_l1_loss", ""}), Better::lower);
  EXPECT_EQ(better_of({"kv_l1_loss", "key"}), Better::lower);
  EXPECT_EQ(better_of({"kv_l1_loss", "rho"}), Better::higher);     // loss = 1 - f rho
  EXPECT_EQ(better_of({"kv_l1_loss", "token"}), Better::neither);  // 1 - f: the budget sets it
  EXPECT_EQ(better_of({"span_recall", "needle.any"}), Better::higher);
}

TEST(MetricCards, AVariantMayHaveAUnitOfItsOwn) {
  EXPECT_EQ(unit_of({"kv_l1_loss", ""}), "share");
  EXPECT_EQ(unit_of({"kv_l1_loss", "key"}), "share");
  EXPECT_EQ(unit_of({"kv_l1_loss", "rho"}), "ratio");  // of two means: above 1 where large tokens stay
  EXPECT_EQ(unit_of({"kv_l1_loss", "absolute"}), "L1 norm per number");
  EXPECT_EQ(unit_of({"span_recall", "needle.any"}), "share");
  EXPECT_EQ(unit_of({"kv_l1_loss", "of another version"}), "share");
}

TEST(MetricNames, BothKindsOfSpanMetricsAreSpelledOut) {
  const std::vector<Span> spans{{"needle", "needle", 2, 5}};
  const std::vector<MetricName> spelled = metrics_of_trace(parse_metrics("span_erased"), spans, 10);
  for (const char* variant : {"needle.all", "needle.layer"})
    EXPECT_EQ(std::ranges::count(spelled, MetricName{"span_erased", variant}), 1) << variant;
  EXPECT_EQ(std::ranges::count(spelled, "span_erased", &MetricName::metric), 2);
}

TEST(MetricNames, OfTwoSpansOfOneNameTheFirstCounts) {
  const std::vector<MetricName> asked = parse_metrics("span_recall");
  const auto spans_of = [&](const std::vector<Span>& spans) {
    return std::ranges::count(metrics_of_trace(asked, spans, 10), "span_recall", &MetricName::metric);
  };
  EXPECT_EQ(spans_of({{"s", "context", 2, 4}, {"s", "context", 8, 12}}), 3);
  EXPECT_EQ(spans_of({{"s", "context", 8, 12}, {"s", "context", 2, 4}}), 0);
}

TEST(MetricsOfMoments, OfThreeKeysByHand) {
  EXPECT_DOUBLE_EQ(from_moments("attention_recall"), 0.7);
  EXPECT_DOUBLE_EQ(from_moments("attention_recall", "prompt"), 0.7);
  EXPECT_NEAR(from_moments("attention_cosine"), 0.873589, 1e-6);
  EXPECT_NEAR(from_moments("attention_l1"), 0.6, 1e-15);
  EXPECT_NEAR(from_moments("output_cosine"), 0.942103, 1e-6);
  EXPECT_NEAR(from_moments("output_error"), 0.428571, 1e-6);
  EXPECT_NEAR(from_moments("attention_cosine", "logits"), 2.0 / 3, 1e-15);
  EXPECT_NEAR(from_moments("attention_cosine", "unaligned"), 0.31 / std::sqrt(0.29 * 0.38), 1e-15);
}

TEST(MetricsOfMoments, SinkMassIsWhatThePromptHasBeyondItsOtherKeys) {
  const auto sink_mass = measure<OfMoments>("sink_mass");
  EXPECT_DOUBLE_EQ(sink_mass.from_moments({.mass = 0.9, .prompt_mass = 0.7, .nosink_mass = 0.2}, {}), 0.5);
  EXPECT_EQ(sink_mass.from_moments({.mass = 0.9, .prompt_mass = 0.7, .nosink_mass = 0.7}, {}), 0);
  EXPECT_EQ(sink_mass.from_moments({.prompt_mass = 0.7, .nosink_mass = std::nextafter(0.7, 1)}, {}), 0);
}

TEST(MetricsOfMoments, ThePooledErrorReadsSquares) {
  const auto pooled = measure<OfPooledMoments>("output_error", "pooled");
  EXPECT_EQ(pooled.part.from_moments(kept_moments, full_moments), kept_moments.error_square);
  EXPECT_EQ(pooled.whole.from_moments(kept_moments, full_moments), 0.74);
  EXPECT_EQ(pooled.part.from_comparison(compared), compared.error_square);
  EXPECT_EQ(pooled.whole.from_comparison(compared), 0.74);
  EXPECT_TRUE(pooled.part.reads.outputs && pooled.whole.reads.outputs);
}

TEST(MetricsOfMoments, WorstQueriesArePercentiles) {
  const auto least = measure<OfMoments>("attention_recall", "worst").over_queries;
  const auto greatest = measure<OfMoments>("output_error", "worst").over_queries;
  std::vector<double> three{0.5, 0.1, 0.9};
  EXPECT_DOUBLE_EQ(least(three), 0.1 + 0.1 * 0.4);  // place 0.05 * 2
  EXPECT_DOUBLE_EQ(greatest(three), 0.5 + 0.9 * 0.4);
  std::vector<double> ascending(21);
  for (std::size_t i = 0; i < ascending.size(); ++i) ascending[i] = static_cast<double>(i);
  EXPECT_DOUBLE_EQ(least(ascending), 1);  // place 0.05 * 20
  EXPECT_DOUBLE_EQ(greatest(ascending), 19);
  std::vector<double> one{0.25};
  EXPECT_EQ(least(one), 0.25);
  EXPECT_EQ(greatest(one), 0.25);
  std::vector<double> undefined{0.25, std::nan("")}, endless{0, HUGE_VAL, HUGE_VAL};
  EXPECT_TRUE(std::isnan(least(undefined)));
  EXPECT_EQ(greatest(endless), HUGE_VAL);
}

TEST(MetricsOfMoments, ReductionsOverQueriesLayerByLayer) {
  AtQuery mean{[](const Moments& kept, const Moments&) { return kept.mass; }};
  AtQuery worst = mean;
  worst.over_queries = measure<OfMoments>("attention_recall", "worst").over_queries;
  MomentMeans means({mean, worst}, 2, 1, 3);
  const Moments first[] = {{.mass = 0.5}, {.mass = 0.1}, {.mass = 0.9}}, full[3];
  const Moments second[] = {{.mass = 0.8}, {.mass = 0.8}, {.mass = 0.2}};
  means.add(0, 0, 0, first, full);
  means.add(1, 0, 0, std::span(second).first(2), std::span(full).first(2));
  means.add(1, 0, 2, std::span(second).last(1), std::span(full).last(1));
  EXPECT_DOUBLE_EQ(means.means(0)(0, 0), 0.5);
  EXPECT_DOUBLE_EQ(means.means(1)(0, 0), 0.14);
  EXPECT_DOUBLE_EQ(means.means(0)(1, 0), 0.6);
  EXPECT_DOUBLE_EQ(means.means(1)(1, 0), 0.26);
}

TEST(MetricsOfMoments, SumsOverTheHeadsOfEachQuery) {
  const AtQuery mass{[](const Moments& kept, const Moments&) { return kept.mass; }};
  MomentMeans means({mass}, 2, 2, 3, 3);
  for (int layer = 0; layer < 2; ++layer)
    for (int head = 0; head < 2; ++head)
      for (int query = 0; query < 3; ++query) {
        const Moments kept[] = {{.mass = 100.0 * layer + 10.0 * head + query}}, full[1];
        means.add(layer, head, query, kept, full);
      }
  const Matrix& sums = means.sums_of_heads(0);
  for (int query = 0; query < 3; ++query) {
    EXPECT_EQ(sums(0, query), 10 + 2 * query);
    EXPECT_EQ(sums(1, query), 210 + 2 * query);
  }
  EXPECT_EQ(means.means(0)(1, 1), 111);
}

TEST(MetricsOfMoments, TheGeneralPathSaysTheSame) {
  for (const char* metric : {"attention_recall", "attention_cosine", "attention_l1", "output_cosine", "output_error"}) {
    const auto of = measure<OfMoments>(metric);
    ASSERT_NE(of.from_comparison, nullptr) << metric;
    EXPECT_NEAR(of.from_comparison(compared), of.from_moments(kept_moments, full_moments), 1e-15) << metric;
  }
  for (const char* variant : {"prompt", "logits"}) {
    const auto of = measure<OfMoments>("attention_cosine", variant);
    ASSERT_NE(of.from_comparison, nullptr) << variant;
    EXPECT_NEAR(of.from_comparison(compared), of.from_moments(kept_moments, full_moments), 1e-15) << variant;
  }
}

TEST(MetricsOfMoments, OfMovedKeysTheComparisonCounts) {
  // What moved keys are attended by is not the renormalised part of the full attention.
  const Comparison moved{.all = {.dot = 0.3, .full_square = 0.36, .stored_square = 1},
                         .prompt = {},
                         .nosink = {.dot = 0.1, .full_square = 0.04, .stored_square = 1},
                         .logits = {},
                         .l1 = 0.9,
                         .mass = 0.7,
                         .output_full_square = 4,
                         .output_square = 9,
                         .output_dot = 3,
                         .error_square = 1};
  const auto of = [&](const char* metric, const char* variant = "") {
    return measure<OfMoments>(metric, variant)(kept_moments, full_moments, &moved);
  };
  EXPECT_DOUBLE_EQ(of("attention_recall"), 0.7);
  EXPECT_DOUBLE_EQ(of("attention_cosine"), 0.5);
  EXPECT_DOUBLE_EQ(of("attention_cosine", "nosink"), 0.5);
  EXPECT_DOUBLE_EQ(of("attention_l1"), 0.9);
  EXPECT_DOUBLE_EQ(of("output_cosine"), 0.5);
  EXPECT_DOUBLE_EQ(of("output_error"), 0.5);
  EXPECT_DOUBLE_EQ(of("attention_recall", "prompt"), 0.7) << "recall is of the full attention: moments know it";
  const auto rows = measure<OfAllQueries>("attention_cosine", "rows");
  EXPECT_DOUBLE_EQ(rows(kept_moments, full_moments, &moved), 0.5);
}

TEST(MetricsOfMoments, NothingOverNothing) {
  const Moments none;
  EXPECT_EQ(measure<OfMoments>("attention_recall", "nosink").from_moments(none, none), 1);
  EXPECT_EQ(measure<OfMoments>("attention_recall", "prompt").from_moments(none, none), 1);
  EXPECT_EQ(measure<OfMoments>("attention_cosine").from_moments(none, none), 0);
  EXPECT_EQ(measure<OfMoments>("attention_cosine", "logits").from_moments(none, none), 0);
  EXPECT_EQ(measure<OfMoments>("attention_cosine", "unaligned").from_moments(none, full_moments), 0);
  EXPECT_EQ(measure<OfMoments>("output_cosine").from_moments(none, none), 1);
  EXPECT_EQ(measure<OfMoments>("output_cosine").from_moments(none, full_moments), 0);
  EXPECT_EQ(measure<OfMoments>("output_error").from_moments(none, none), 0);
}

TEST(MetricsOfMoments, EverythingKeptIsExact) {
  const Moments odd{.mass = 1, .square = 0.1, .output_square = 0.3, .output_dot = 0.3};
  EXPECT_EQ(measure<OfMoments>("attention_recall").from_moments(odd, odd), 1);
  EXPECT_EQ(measure<OfMoments>("attention_cosine").from_moments(odd, odd), 1);
  EXPECT_EQ(measure<OfMoments>("attention_l1").from_moments(odd, odd), 0);
  EXPECT_EQ(measure<OfMoments>("output_cosine").from_moments(odd, odd), 1);
  EXPECT_EQ(measure<OfMoments>("output_error").from_moments(odd, odd), 0);
}

LayerSelection selection(Heads heads, int tokens, const std::vector<std::vector<int>>& kept, int sinks = 0,
                         int recent = 0) {
  const std::size_t rows = kept.size();
  LayerSelection made{KeptSet(heads, static_cast<int>(rows), tokens), std::vector<int>(rows, sinks),
                      std::vector<int>(rows, recent), std::vector<int>(rows, 0), 0};
  for (std::size_t row = 0; row < rows; ++row)
    for (const int j : kept[row]) made.set.keep(static_cast<int>(row), j);
  return made;
}

/// 4 query and 2 KV heads of 3 float16 numbers; 4 prompt and 2 more tokens. Norms of keys: 1 2 3 4 and 2 2 2 2; of
/// values: ten times as much.
class MetricsOfLayer : public ::testing::Test {
 protected:
  MetricsOfLayer() {
    tensors.q = {nullptr, DType::float16, 4, 6, 3};
    tensors.k = tensors.v = {nullptr, DType::float16, 2, 6, 3};
  }

  LayerValues value(const std::string& metric, const std::string& variant, const LayerSelection& made) {
    const LayerView view(backend, tensors, {.layer = 0, .layers = 1, .stored_layer = 0, .prompt = 4}, eval);
    Matrix norms(2, 4);
    for (int j = 0; j < 4; ++j) {
      norms(0, j) = j + 1;
      norms(1, j) = 2;
    }
    backend.norm_values = norms;
    view.key_norms(1);
    for (double& norm : backend.norm_values.values()) norm *= 10;
    view.value_norms(1);
    return measure<OfLayer>(metric, variant).measure({view, made});
  }
  LayerValues value(const std::string& metric, const LayerSelection& made) { return value(metric, "", made); }

  double held_tokens(const LayerSelection& made) {
    const LayerView view(backend, tensors, {.layer = 0, .layers = 1, .stored_layer = 0, .prompt = 4}, eval);
    std::vector<double> held;
    for (const std::int32_t query : eval)
      held.push_back(measure<OfLayerAtQuery>("held_tokens").measure({view, made}, query));
    return mean(held);
  }

  std::vector<double> unprotected_recall(const LayerSelection& made) {
    const LayerView view(backend, tensors, {.layer = 0, .layers = 1, .stored_layer = 0, .prompt = 4}, eval);
    return measure<OfEvalAttention>("attention_recall", "unprotected").measure({view, made});
  }

  FakeBackend backend;
  LayerTensors tensors;
  std::vector<std::int32_t> eval{4, 5};
};

TEST_F(MetricsOfLayer, RecallOfWhatIsNotProtected) {
  // Sums over the two eval queries: of heads 0 and 1 (KV head 0), 2 and 3 (KV head 1).
  backend.sums = Matrix(4, 4);
  const double received[4][4] = {{1, 0.25, 0.5, 0.1}, {1, 0.5, 0, 0.1}, {1, 0.25, 0.75, 0}, {1, 0, 0, 1}};
  for (int head = 0; head < 4; ++head) std::ranges::copy(received[head], backend.sums.row(head).begin());
  const LayerSelection made = selection(Heads::kv, 4, {{0, 1, 3}, {0, 2, 3}}, 1, 1);
  EXPECT_EQ(unprotected_recall(made), (std::vector<double>{1.0 / 3, 1, 0.75, 1})) << "head 3 gives them nothing";
  EXPECT_EQ(unprotected_recall(selection(Heads::layer, 4, {{0, 3}}, 1, 0)),
            (std::vector<double>{0.1 / (0.75 + 0.1), 0.1 / (0.5 + 0.1), 0, 1}));
  EXPECT_EQ(unprotected_recall(selection(Heads::layer, 4, {{0, 1, 3}}, 2, 2)), std::vector<double>(4, 1.0));
}

TEST_F(MetricsOfLayer, KvL1LossIsARatioOfSums) {
  const LayerSelection made = selection(Heads::kv, 4, {{3}, {0, 1}});
  const LayerValues loss = value("kv_l1_loss", made);
  EXPECT_EQ(loss.heads, (std::vector<double>{0.6, 0.5}));
  EXPECT_DOUBLE_EQ(loss.layer, (6.0 + 4.0) / 18);
  EXPECT_DOUBLE_EQ(value("kv_l1_loss", "key", made).layer, 10.0 / 18);
  EXPECT_DOUBLE_EQ(value("kv_l1_loss", "absolute", made).layer, 110.0 / (8 * 6));
  EXPECT_DOUBLE_EQ(value("kv_l1_loss", "token", made).layer, 5.0 / 8);
  // 1 - f rho, f = 3/8.
  EXPECT_DOUBLE_EQ(1 - 3.0 / 8 * value("kv_l1_loss", "rho", made).layer, loss.layer);
}

TEST_F(MetricsOfLayer, KvL1LossKnowsKeysFromValues) {
  LayerSelection made = selection(Heads::kv, 4, {{}, {}});
  EXPECT_EQ(value("kv_l1_loss", "absolute", made).layer, 18 * 11.0 / (8 * 6));
  EXPECT_EQ(value("kv_l1_loss", "value", made).layer, 1);
  EXPECT_TRUE(std::isnan(value("kv_l1_loss", "rho", made).layer));
}

TEST_F(MetricsOfLayer, KvL1LossByGranularity) {
  // A query head's row is held against its KV head; one set for the layer against both.
  const LayerValues query = value("kv_l1_loss", selection(Heads::query, 4, {{3}, {2, 3}, {0}, {}}));
  EXPECT_EQ(query.heads, (std::vector<double>{0.6, 0.3, 0.75, 1}));
  EXPECT_DOUBLE_EQ(query.layer, (6.0 + 3 + 6 + 8) / 36);
  const LayerValues layer = value("kv_l1_loss", selection(Heads::layer, 4, {{3}}));
  EXPECT_EQ(layer.heads.size(), 1U);
  EXPECT_DOUBLE_EQ(layer.layer, 12.0 / 18);
}

TEST_F(MetricsOfLayer, BudgetsWithAndWithoutWhatIsProtected) {
  const LayerSelection made = selection(Heads::kv, 4, {{0, 1, 3}, {0, 3}}, 1, 1);
  EXPECT_EQ(value("layer_budget", made).heads, (std::vector<double>{3, 2}));
  EXPECT_EQ(value("layer_budget", made).layer, 2.5);
  EXPECT_EQ(value("layer_budget", "unprotected", made).heads, (std::vector<double>{1, 0}));
  EXPECT_EQ(value("kept_tokens", made).layer, 2.5);
  EXPECT_EQ(value("compression", made).layer, 4 / 2.5);
}

TEST_F(MetricsOfLayer, CompressionOfTheContextLeavesOutWhatStaysByRule) {
  // Of 4 tokens one is a sink and one is recent: 2 candidates, of which 1 and 0 stay.
  EXPECT_EQ(value("compression", "context", selection(Heads::kv, 4, {{0, 1, 3}, {0, 3}}, 1, 1)).layer, 4.0);
  // 3 of 3 candidates.
  EXPECT_EQ(value("compression", "context", selection(Heads::layer, 4, {{0, 1, 2, 3}}, 0, 1)).layer, 1.0);
}

/// One row: 0 stays, 1 goes after query 2, 2 after query 4, 3 after query 3; 4 and 5 follow the prompt, 4 goes after 4.
LayerSelection changing() {
  LayerSelection made = selection(Heads::layer, 4, {{0, 2}});
  made.evicted_at = {-1, 2, 4, 3, 4, -1};
  return made;
}

TEST_F(MetricsOfLayer, ResidentsBeforeEachEviction) {
  // t = 0 ... 5 sees 1, 2, 3, {0,2,3}, {0,2,4}, {0,5}.
  const LayerSelection made = changing();
  EXPECT_EQ(value("resident_tokens", "peak", made).layer, 3);
  EXPECT_DOUBLE_EQ(value("resident_tokens", "mean", made).layer, 14.0 / 6);
  // One set for both KV heads: 24 bytes a token.
  EXPECT_EQ(value("kv_bytes", "peak", made).layer, 24 * 3);
  EXPECT_DOUBLE_EQ(value("kv_bytes", "mean", made).layer, 24 * 14.0 / 6);
  EXPECT_EQ(value("kv_bytes", made).layer, 24 * 2) << "at the end of the prompt";
}

TEST_F(MetricsOfLayer, DecidedOnceAllOfThePromptIsHeldUntilThen) {
  const LayerSelection made = selection(Heads::kv, 4, {{3}, {0, 1}});
  // 1, 2, 3, 4, and then 1 + 1, 1 + 2 or 2 + 1, 2 + 2.
  EXPECT_EQ(value("resident_tokens", "peak", made).layer, 4);
  EXPECT_DOUBLE_EQ(value("resident_tokens", "mean", made).layer, (15.0 / 6 + 17.0 / 6) / 2);
  EXPECT_EQ(value("kv_bytes", "peak", made).layer, 12 * (4 + 4));
  EXPECT_DOUBLE_EQ(value("kv_bytes", "mean", made).layer, 12 * (15 + 17) / 6.0);
}

TEST_F(MetricsOfLayer, HeldTokensOfSetsThatChange) {
  EXPECT_EQ(held_tokens(changing()), (3 + 2) / 2.0);
  eval = {1, 3};
  EXPECT_EQ(held_tokens(changing()), (2 + 3) / 2.0);
}

TEST_F(MetricsOfLayer, RecallOfWhatIsNotProtectedIsOfStaticSets) {
  for (const double recall : unprotected_recall(changing())) EXPECT_TRUE(std::isnan(recall));
}

TEST_F(MetricsOfLayer, BytesOfAStoreAreItsOwn) {
  const LayerView view(backend, tensors, {.prompt = 4}, eval);
  const LayerSelection made = selection(Heads::kv, 4, {{0, 1, 2, 3}, {0, 1, 2, 3}});
  StoredLayer stored;
  stored.bytes = 20;
  const auto bytes = [&](const char* variant) {
    return measure<OfLayer>("kv_bytes", variant).measure({view, made, &stored}).layer;
  };
  EXPECT_EQ(bytes(""), 20);
  EXPECT_EQ(bytes("union"), 20);
  EXPECT_EQ(bytes("attention-heads"), 40) << "4 query heads read 2 KV heads";
  EXPECT_TRUE(std::isnan(bytes("peak")));
  EXPECT_TRUE(std::isnan(bytes("mean")));
}

TEST_F(MetricsOfLayer, BytesByGranularity) {
  // 2 tensors of 3 numbers of 2 bytes: 12 bytes a token and KV head.
  EXPECT_EQ(value("kv_bytes", selection(Heads::kv, 4, {{0, 1, 3}, {0, 3}})).layer, 12 * 5);
  EXPECT_EQ(value("kv_bytes", selection(Heads::layer, 4, {{0, 1, 3}})).layer, 12 * 6);
  const LayerSelection query = selection(Heads::query, 4, {{0, 1}, {1, 2}, {3}, {3}});
  EXPECT_EQ(value("kv_bytes", query).layer, 12 * 6);
  EXPECT_EQ(value("kv_bytes", "union", query).layer, 12 * 4);
  EXPECT_EQ(value("kv_bytes", "attention-heads", selection(Heads::layer, 4, {{0, 1, 3}})).layer, 12 * 4 * 3);
}

TEST_F(MetricsOfLayer, HeldTokensSeeTheContinuationAndThemselves) {
  const LayerSelection made = selection(Heads::kv, 4, {{0, 1, 3}, {0}});
  EXPECT_EQ(held_tokens(made), 2 + 1.5);
  eval = {1, 2};  // inside the prompt: query 2 is held beside what is kept up to it
  EXPECT_EQ(held_tokens(made), ((2 + 3) + (2 + 2)) / 4.0);
  eval = {5};
  tensors.sliding_window = 3;  // sees 3, 4, 5
  EXPECT_EQ(held_tokens(made), (3 + 2) / 2.0);
}

TEST_F(MetricsOfLayer, SpanRecall) {
  const LayerView view(backend, tensors, {.layer = 0, .layers = 1, .stored_layer = 0, .prompt = 4}, eval);
  const LayerSelection made = selection(Heads::kv, 4, {{3}, {1, 2}});
  const Span wide{"needle", "needle", 1, 4}, narrow{"needle", "needle", 1, 3};
  const auto of = [&](const char* variant, const Span& span) {
    return measure<OfSpan>("span_recall", variant).measure({view, made}, span);
  };
  EXPECT_EQ(of("any", wide), 1);
  EXPECT_DOUBLE_EQ(of("any", narrow), 2.0 / 2);
  EXPECT_DOUBLE_EQ(of("mean", wide), 3.0 / 6);
  EXPECT_EQ(of("full", wide), 0);
  EXPECT_EQ(of("full", narrow), 1);
}

TEST_F(MetricsOfLayer, SpanErased) {
  const LayerView view(backend, tensors, {.layer = 0, .layers = 1, .stored_layer = 0, .prompt = 4}, eval);
  const std::vector<LayerSelection> layers{selection(Heads::kv, 4, {{3}, {3}}), selection(Heads::layer, 4, {{2}})};
  const auto all = measure<OfSpanInAllLayers>("span_erased", "all");
  const auto layer = measure<OfSpan>("span_erased", "layer");
  const Span wide{"needle", "needle", 0, 4}, last{"needle", "needle", 3, 4};
  EXPECT_DOUBLE_EQ(all.measure(layers, wide), 2.0 / 4);
  EXPECT_EQ(all.measure(layers, last), 0);
  EXPECT_EQ(layer.measure({view, layers[0]}, wide), 3.0 / 4);
  EXPECT_EQ(layer.measure({view, layers[0]}, last), 0);
  EXPECT_EQ(layer.measure({view, layers[1]}, last), 1);
  const LayerSelection apart = selection(Heads::kv, 4, {{0, 1}, {2, 3}});
  EXPECT_EQ(layer.measure({view, apart}, wide), 0) << "each token is kept by some head";
}

TEST_F(MetricsOfLayer, ConsensusOfHeads) {
  // Without sink 0 and recent 5: {1,2} {2,3} {} {2}.
  const LayerSelection made = selection(Heads::query, 6, {{0, 1, 2, 5}, {0, 2, 3, 5}, {0, 5}, {2, 5}}, 1, 1);
  EXPECT_DOUBLE_EQ(value("head_consensus", made).layer, (1.0 / 3 + 0 + 0.5 + 0 + 0.5 + 0) / 6);
  EXPECT_DOUBLE_EQ(value("head_consensus", "protected", made).layer,
                   (3.0 / 5 + 2.0 / 4 + 2.0 / 4 + 2.0 / 4 + 2.0 / 4 + 1.0 / 3) / 6);
  EXPECT_TRUE(value("head_consensus", made).heads.empty());
  EXPECT_EQ(value("head_consensus", selection(Heads::kv, 4, {{0, 3}, {0, 3}}, 1, 1)).layer, 1) << "two empty sets";
  EXPECT_EQ(value("head_consensus", selection(Heads::layer, 4, {{0, 2}})).layer, 1) << "all heads share one set";
}

TEST(MetricsOverLayers, BytesAddUpAndCompressionIsOfTheMean) {
  const std::vector<double> layers{2, 4};
  EXPECT_EQ(measure<OfLayer>("kv_bytes").over_layers(layers), 6);
  EXPECT_EQ(measure<OfLayer>("layer_budget").over_layers(layers), 3);
  // 12 tokens, 6 and 3 kept: 12 / 4.5.
  EXPECT_DOUBLE_EQ(measure<OfLayer>("compression").over_layers(layers), 12 / 4.5);
}

TEST(Jaccard, ByHandInAllReadings) {
  // Sinks {0} and recent {5} go first, except in +protected.
  const std::vector<LayerSelection> layers{selection(Heads::kv, 6, {{0, 1, 2, 5}, {0, 3, 5}}, 1, 1),
                                           selection(Heads::kv, 6, {{0, 2, 3, 5}, {0, 3, 5}}, 1, 1)};
  const auto value = [&](const char* variant) {
    const double adjacent = measure<OfCell>("jaccard_adjacent", variant).measure(layers);
    const Matrix matrix = measure<OfLayerPairs>("jaccard_matrix", variant).measure(layers);
    EXPECT_EQ(matrix(0, 1), adjacent) << variant;
    EXPECT_EQ(matrix(1, 0), adjacent) << variant;
    EXPECT_EQ(matrix(1, 1), 1) << variant;
    return adjacent;
  };
  EXPECT_DOUBLE_EQ(value("first"), 1.0 / 3);
  EXPECT_DOUBLE_EQ(value("mean"), (1.0 / 3 + 1) / 2);
  EXPECT_DOUBLE_EQ(value("union"), 2.0 / 3);
  EXPECT_DOUBLE_EQ(value("first+protected"), 3.0 / 5);
  EXPECT_DOUBLE_EQ(value("mean+protected"), (3.0 / 5 + 1) / 2);
  EXPECT_DOUBLE_EQ(value("union+protected"), 4.0 / 5);
}

TEST(Jaccard, EmptySetsAndASingleLayer) {
  const LayerSelection empty = selection(Heads::layer, 6, {{}}), one = selection(Heads::layer, 6, {{4}});
  const auto first = measure<OfCell>("jaccard_adjacent", "first");
  EXPECT_EQ(first.measure(std::vector{empty, empty}), 1);
  EXPECT_EQ(first.measure(std::vector{empty, one}), 0);
  EXPECT_TRUE(std::isnan(first.measure(std::vector{one})));
}

TEST(MetricRegistry, EveryCardIsWhole) {
  ASSERT_FALSE(metrics().names().empty());
  for (const std::string& name : metrics().names()) {
    const MetricCard& card = metrics().get(name);
    for (const std::string& text : {card.summary, card.unit, card.formula, card.source, card.edges})
      EXPECT_FALSE(text.empty()) << name;
    ASSERT_FALSE(card.variants.empty()) << name;
    for (const MetricVariant& variant : card.variants) EXPECT_FALSE(variant.summary.empty()) << name;
  }
}

TEST(MetricNames, DefaultIsEveryMetricInItsBaseVariants) {
  const std::vector<MetricName> names = parse_metrics("");
  const auto has = [&](const MetricName& name) { return std::ranges::find(names, name) != names.end(); };
  EXPECT_TRUE(has({"attention_recall", ""}));
  EXPECT_FALSE(has({"attention_recall", "prompt"}));
  EXPECT_FALSE(has({"attention_cosine", "rows"}));
  EXPECT_TRUE(has({"span_recall", "full"}));
  EXPECT_TRUE(has({"jaccard_adjacent", "union+protected"}));
}

TEST(MetricNames, AMetricWithoutABaseVariantMeansAllOfThem) {
  EXPECT_EQ(
      parse_metrics("attention_cosine:prompt,span_recall"),
      (std::vector<MetricName>{
          {"attention_cosine", "prompt"}, {"span_recall", "any"}, {"span_recall", "mean"}, {"span_recall", "full"}}));
  EXPECT_EQ(parse_metrics("span_recall:my.needle.any"), (std::vector<MetricName>{{"span_recall", "my.needle.any"}}));
}

TEST(MetricNames, UnknownOnesAreAnsweredWithTheNearest) {
  const auto refusal = [](const char* text) {
    try {
      parse_metrics(text);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refusal("attention_recal"), "attention_recal: unknown metric: did you mean attention_recall?");
  EXPECT_EQ(refusal("attention_cosine:logit"), "attention_cosine: unknown variant logit: did you mean logits?");
  EXPECT_NE(refusal("span_recall:needle.most"), "accepted");
  EXPECT_NE(refusal("kv_bytes:needle.any"), "accepted");
  EXPECT_NE(refusal("kv_bytes,"), "accepted");
}

TEST(MetricNames, SpansOfATraceSpellOutTheirVariants) {
  const std::vector<Span> spans{{"needle", "needle", 2, 5}, {"late", "answer", 8, 12}};
  const auto spelled = [&](const char* asked) {
    std::vector<MetricName> names = metrics_of_trace(parse_metrics(asked), spans, 10);
    std::erase_if(names, [](const MetricName& name) { return name.metric == "jaccard_adjacent"; });
    return names;
  };
  EXPECT_EQ(spelled("span_recall:any"), (std::vector<MetricName>{{"span_recall", "needle.any"}}));
  EXPECT_EQ(spelled("span_recall:needle.full"), (std::vector<MetricName>{{"span_recall", "needle.full"}}));
  EXPECT_TRUE(spelled("span_recall:late.any").empty());
  EXPECT_EQ(metrics_of_trace(parse_metrics("kv_bytes"), spans, 10).size(), 7U);  // with jaccard in six readings
}

}  // namespace
}  // namespace kvreplay::testing
