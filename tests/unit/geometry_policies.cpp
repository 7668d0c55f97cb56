// Scores of policies that look at keys, values and queries without attention, written out from their papers.

#include <gtest/gtest.h>

#include "attention_reference.h"
#include "policies/allocators/skipped_layers.h"
#include "policies/plan_part.h"
#include "policies/scores/leverage.h"
#include "policies/text/configured.h"
#include "replay/replay.h"

namespace kvreplay::testing {
namespace {

using Numbers = std::vector<double>;

Plan plan_of(const std::string& policy) { return ConfiguredPolicy::parse(policy).plans(2).front().plan; }

std::string refusal_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

// ---- knorm

std::vector<int> counts(const std::string& layers, const Division& division) {
  std::vector<int> of_layers;
  for (const std::vector<int>& of_rows : SkippedLayers{.skipped = {.text = layers}}.allocator()->counts(division))
    of_layers.push_back(of_rows.front());
  return of_layers;
}

TEST(SkippedLayers, KeepAllAndTheOthersShareWhatIsLeft) {
  EXPECT_EQ(counts("0,2", {.layers = 4, .prompt = 20, .budget = 12}), (std::vector<int>{20, 4, 20, 4}));
  EXPECT_EQ(counts("1", {.layers = 4, .prompt = 20, .budget = 8}), (std::vector<int>{4, 20, 4, 4}));
  EXPECT_EQ(counts("0", {.layers = 3, .prompt = 20, .budget = 9}), (std::vector<int>{20, 4, 3}));
  EXPECT_EQ(counts("0", {.layers = 3, .prompt = 20, .budget = 8}), (std::vector<int>{20, 2, 2}));
  EXPECT_TRUE(plan_of("knorm").allocate->is_uniform);
}

TEST(SkippedLayers, AreRefusedWhereTheBudgetHasNoRoomForThem) {
  EXPECT_EQ(refusal_of([] { counts("0", {.layers = 3, .prompt = 20, .budget = 7}); }),
            "skip_layers: budget too small for the layers that keep everything: expected a budget of at least 8 tokens "
            "per layer, found 7");
  EXPECT_EQ(counts("0", {.layers = 2, .prompt = 21, .budget = 11}), (std::vector<int>{21, 1}));
  EXPECT_NE(refusal_of([] { counts("0", {.layers = 2, .prompt = 21, .budget = 11, .sinks = 1, .recent = 1}); }),
            "accepted")
      << "two tokens stay by rule";
  EXPECT_EQ(refusal_of([] { counts("1,3", {.layers = 3, .prompt = 20, .budget = 19}); }),
            "skip_layers: no such layer: expected 0..2, found 3");
}

TEST(SkippedLayers, HaveOneNormalForm) {
  EXPECT_EQ(ConfiguredPolicy::parse("knorm:skip_layers=(2,0,2)").label(), "knorm:skip_layers=(0,2)");
  EXPECT_EQ(refusal_of([] { ConfiguredPolicy::parse("knorm:skip_layers=-1"); }).substr(0, 12), "skip_layers:");
}

// ---- on a layer

class ScoresOf : public ::testing::TestWithParam<bool> {
 protected:
  static constexpr int prompt = 41;
  static constexpr int dim = 8;

  Matrix scores(const std::string& policy, const LayerView& of, int budget = 10) const {
    const Plan plan = plan_of(policy);
    const Protection::Clamped by_rule = plan.protect.within(of.tokens(), of.prompt(), {});
    const int sinks = resident_sinks(of.positions(0).numbers(), by_rule.sinks);
    return plan.score.score(of,
                            {.grouping = plan.grouping, .recent = by_rule.recent, .budget = budget, .sinks = sinks});
  }
  Matrix scores(const std::string& policy, int budget = 10) const { return scores(policy, view, budget); }

  Numbers unrotated(Numbers x, int position) const {
    x = layer.rotated(std::move(x), -position);
    for (double& number : x) number /= tensors.rope.attention_scaling;
    return x;
  }
  Numbers row(const RandomTensor& tensor, int head, int token) const { return tensor.row(head, token); }
  double value_length(int head, int j) const {
    const Numbers value = layer.v.row(head, j);
    return std::sqrt(std::inner_product(value.begin(), value.end(), value.begin(), 0.0));
  }

  /// [2, tokens] z-scores of x' (X'X + ridge I)^-1 x by Gaussian elimination; `phi` combines channels.
  Matrix leverages(const LayerView& of, double ridge,
                   const std::function<std::vector<Numbers>(int head)>& phi = {}) const {
    Matrix found(2, of.tokens());
    for (int head = 0; head < 2; ++head) {
      std::vector<Numbers> x;
      for (const std::int32_t j : of.positions(head).numbers()) x.push_back(unrotated(layer.k.row(head, j), j));
      Numbers mean(dim);
      for (const Numbers& one : x)
        for (std::size_t c = 0; c < dim; ++c) mean[c] += one[c] / static_cast<double>(x.size());
      for (Numbers& one : x) {
        for (std::size_t c = 0; c < dim; ++c) one[c] -= mean[c];
        if (phi) {
          const std::vector<Numbers> columns = phi(head);
          Numbers combined(columns.front().size());
          for (std::size_t c = 0; c < dim; ++c)
            for (std::size_t s = 0; s < combined.size(); ++s) combined[s] += one[c] * columns[c][s];
          one = combined;
        }
      }
      const std::size_t width = x.front().size();
      for (int j = 0; j < of.tokens(); ++j) {
        std::vector<Numbers> system(width, Numbers(width + 1));
        for (std::size_t r = 0; r < width; ++r) {
          for (std::size_t c = 0; c < width; ++c)
            for (const Numbers& one : x) system[r][c] += one[r] * one[c];
          system[r][r] += ridge;
          system[r][width] = x[static_cast<std::size_t>(j)][r];
        }
        const Numbers solved = solve(system);
        for (std::size_t r = 0; r < width; ++r) found(head, j) += solved[r] * x[static_cast<std::size_t>(j)][r];
      }
    }
    return standardised(found);
  }

  static Numbers solve(std::vector<Numbers> system) {
    const std::size_t width = system.size();
    for (std::size_t p = 0; p < width; ++p)
      for (std::size_t r = 0; r < width; ++r)
        if (r != p)
          for (std::size_t c = width + 1; c-- > p;) system[r][c] -= system[r][p] / system[p][p] * system[p][c];
    Numbers solution;
    for (std::size_t p = 0; p < width; ++p) solution.push_back(system[p][width] / system[p][p]);
    return solution;
  }

  static Matrix standardised(Matrix scores) {
    const auto count = static_cast<double>(scores.values().size());
    const double mean = std::accumulate(scores.values().begin(), scores.values().end(), 0.0) / count;
    double variance = 0;
    for (const double score : scores.values()) variance += (score - mean) * (score - mean) / count;
    for (double& score : scores.values()) score = (score - mean) / std::sqrt(variance);
    return scores;
  }

  static void expect_near(const Matrix& found, const Matrix& expected, double tolerance) {
    ASSERT_EQ(found.rows(), expected.rows());
    ASSERT_EQ(found.columns(), expected.columns());
    for (int r = 0; r < found.rows(); ++r)
      for (int j = 0; j < found.columns(); ++j) EXPECT_NEAR(found(r, j), expected(r, j), tolerance) << r << ", " << j;
  }

  RandomLayer layer{{.tokens = 60, .rope_pairs = 3, .interleaved = GetParam()}};
  const std::vector<std::int32_t> eval = range(prompt, 60);
  LayerTensors tensors = [this] {
    LayerTensors made = layer.tensors();
    made.rope.attention_scaling = 1.25;
    return made;
  }();
  std::unique_ptr<Backend> backend = tested_backend(2);
  LayerView view{*backend, tensors, {.stored_layer = 3, .prompt = prompt}, eval};
  // Twelve tokens of each KV head, at slots of the cache; 30 have come.
  const std::vector<std::int32_t> held_positions{0, 2, 3, 5,  8,  11, 13, 17, 21, 22, 28, 29,
                                                 1, 2, 4, 10, 12, 14, 15, 16, 20, 25, 28, 29};
  LayerView held{view, {.positions = held_positions, .rows = 2, .seen = 30, .added = 2, .place = Positions::cache}};
};

INSTANTIATE_TEST_SUITE_P(Pairs, ScoresOf, ::testing::Bool());

TEST_P(ScoresOf, LeverageIsThatOfTheUnrotatedKeysThatAreHeld) {
  expect_near(scores("leverage"), leverages(view, 0.01), 1e-9);
  expect_near(scores("leverage:ridge=2"), leverages(view, 2), 1e-9);
  expect_near(scores("leverage", held), leverages(held, 0.01), 1e-9);
}

TEST_P(ScoresOf, SketchesCombineChannelsAtRandom) {
  const auto phi = [](int head) {
    std::vector<Numbers> channels;
    for (int channel = 0; channel < dim; ++channel) {
      Numbers& row = channels.emplace_back();
      for (int column = 0; column < 3; ++column) {
        const double u1 = uniform(chain(7, 3, head, channel, column, 0));
        const double u2 = uniform(chain(7, 3, head, channel, column, 1));
        row.push_back(std::sqrt(-2 * std::log(u1)) * std::cos(2 * 3.14159265358979323846 * u2) / std::sqrt(3.0));
      }
    }
    return channels;
  };
  expect_near(scores("leverage:sketch=3,seed=7"), leverages(view, 0.01, phi), 1e-9);
}

TEST_P(ScoresOf, CompactorMixesLeverageWithWhatTokensOfABlockReceive) {
  const auto expected = [&](int first, int end, int size, double mix) {
    const int n = end - first;
    Matrix received(2, n);
    for (int head = 0; head < 4; ++head)
      for (int t = 0; t < n; ++t) {
        const int begin = t / size * size, behind = std::min(begin + size, n);
        Numbers weights;
        double sum = 0;
        for (int j = begin; j < behind; ++j) {
          const Numbers q = layer.query(head, first + t), k = layer.k.row(head / 2, first + j);
          sum += weights.emplace_back(std::exp(std::inner_product(q.begin(), q.end(), k.begin(), 0.0)));
        }
        for (int j = begin; j < behind; ++j)
          received(head / 2, j) +=
              weights[static_cast<std::size_t>(j - begin)] / sum / 2 * value_length(head / 2, first + j);
      }
    Matrix pooled(2, n);
    for (int head = 0; head < 2; ++head)
      for (int j = 0; j < n; ++j)
        for (int i = std::max(0, j - 1); i <= std::min(n - 1, j + 1); ++i) pooled(head, j) += received(head, i) / 3;
    const LayerView scored(view, {.positions = range(first, end), .seen = prompt, .added = n});
    const Matrix of_keys = leverages(scored, 0.01);
    Matrix mixed = standardised(pooled);
    for (int r = 0; r < 2; ++r)
      for (int j = 0; j < n; ++j) mixed(r, j) += mix * of_keys(r, j);
    Matrix all(2, prompt, std::ranges::max(mixed.values()));
    for (int r = 0; r < 2; ++r) std::ranges::copy(mixed.row(r), all.row(r).begin() + first);
    return all;
  };
  expect_near(scores("compactor:block=16", 10), expected(8, prompt - 4, 16, 1 - 10.0 / prompt), 2e-5);
  expect_near(scores("compactor:block=16", 30), expected(8, prompt - 4, 16, 1 - 30.0 / prompt), 2e-5);
  expect_near(scores("compactor:block=16,mix=0.35"), expected(8, prompt - 4, 16, 0.35), 2e-5);
  expect_near(scores("compactor:sinks=0,recent=0,block=7,mix=1"), expected(0, prompt, 7, 1), 2e-5);
  expect_near(scores("compactor:sinks=3,recent=1"), expected(3, prompt - 1, prompt, 1 - 10.0 / prompt), 2e-5);
}

TEST_P(ScoresOf, CompactorScoresNothingWhereEveryTokenIsProtected) {
  for (const char* policy :
       {"compactor:sinks=41", "compactor:recent=41", "compactor:sinks=40,recent=1", "compactor:sinks=40,recent=40"})
    expect_near(scores(policy), Matrix(2, prompt), 0);
}

TEST_P(ScoresOf, OneSetForTheLayerIsScoredAtTheSameBudget) {
  const Matrix rows = scores("compactor:block=16", 10), layer_wide = scores("compactor:block=16,heads=layer", 10);
  for (int j = 0; j < prompt; ++j) EXPECT_NEAR(layer_wide(0, j), rows(0, j) + rows(1, j), 1e-12) << j;
}

TEST_P(ScoresOf, ExpectedAttentionIsThatOfGaussianQueriesAtTheNextPositions) {
  const auto expected = [&](const LayerView& of, int sinks, int future, bool covariance, double epsilon, bool vnorm) {
    const int seen = of.residents().seen, next = &of == &view ? seen : of.tokens();
    const auto first =
        static_cast<int>(std::ranges::count_if(of.positions(0).numbers(), [&](int j) { return j < sinks; }));
    Matrix per_head(4, of.tokens());
    for (int head = 0; head < 4; ++head) {
      std::vector<Numbers> queries;  // as they would stand on average at the next positions
      for (int t = sinks; t < seen; ++t) {
        const Numbers before = unrotated(layer.query(head, t), t);
        Numbers mean(dim);
        for (int i = 0; i < future; ++i) {
          const Numbers there = layer.rotated(before, next + i);
          for (std::size_t c = 0; c < dim; ++c) mean[c] += 1.25 * there[c] / future;
        }
        queries.push_back(mean);
      }
      double sum = 0;
      for (int j = first; j < of.tokens(); ++j) {
        const int position = of.positions(head / 2)[j].number;
        const Numbers key = layer.rotated(layer.k.row(head / 2, position), &of == &view ? 0 : j - position);
        // Products of a query with the key are Gaussian: exp of their mean and half their variance.
        Numbers logits;
        for (const Numbers& query : queries)
          logits.push_back(static_cast<double>(tensors.softmax_scale) *
                           std::inner_product(query.begin(), query.end(), key.begin(), 0.0));
        const auto count = static_cast<double>(logits.size());
        const double mean = std::accumulate(logits.begin(), logits.end(), 0.0) / count;
        double variance = 0;
        for (const double logit : logits) variance += (logit - mean) * (logit - mean) / count;
        sum += per_head(head, j) = std::exp(mean + (covariance ? variance / 2 : 0.0));
      }
      for (int j = first; j < of.tokens(); ++j) {
        per_head(head, j) /= sum;
        const int position = of.positions(head / 2)[j].number;
        if (vnorm) per_head(head, j) = (per_head(head, j) + epsilon) * value_length(head / 2, position);
      }
    }
    return per_head;
  };
  const auto with_sinks = [](Matrix rows, int sinks) {
    for (int r = 0; r < rows.rows(); ++r)
      for (int j = 0; j < sinks; ++j) rows(r, j) = std::ranges::max(rows.row(r));
    return rows;
  };
  const Grouping mean{}, query{.heads = Heads::query};
  const std::string policy = "expected-attention:sinks=2,future=5";
  expect_near(scores(policy), with_sinks(mean(expected(view, 2, 5, true, 0, true), 2), 2), 1e-6);
  expect_near(scores(policy + ",heads=query,epsilon=0.25"),
              with_sinks(query(expected(view, 2, 5, true, 0.25, true), 2), 2), 1e-6);
  expect_near(scores(policy + ",vnorm=false,covariance=false"),
              with_sinks(mean(expected(view, 2, 5, false, 0, false), 2), 2), 1e-9);
  expect_near(scores(policy + ",vnorm=false", held), with_sinks(mean(expected(held, 2, 5, true, 0, false), 2), 1),
              1e-9);
  expect_near(scores("expected-attention:sinks=0,future=1"), mean(expected(view, 0, 1, true, 0, true), 2), 1e-6);
}

TEST_P(ScoresOf, CapKvIsTheLeverageOfValuesWeightedByTheDirectionOfFutureQueries) {
  const auto expected = [&](const LayerView& of, int sinks, double tau, double epsilon, int future) {
    const int seen = of.residents().seen, next = &of == &view ? seen : of.tokens();
    const auto first =
        static_cast<int>(std::ranges::count_if(of.positions(0).numbers(), [&](int j) { return j < sinks; }));
    Matrix per_head(4, of.tokens());
    for (int head = 0; head < 4; ++head) {
      Numbers anchor(dim);
      for (int t = sinks; t < seen; ++t)
        for (int i = 0; i < future; ++i) {
          const Numbers there = layer.rotated(unrotated(layer.query(head, t), t), next + i);
          for (std::size_t c = 0; c < dim; ++c) anchor[c] += there[c];
        }
      const auto length = [](const Numbers& x) {
        return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
      };
      Numbers weights;
      std::vector<Numbers> values;
      for (int j = 0; j < of.tokens(); ++j) {
        const int position = of.positions(head / 2)[j].number;
        const Numbers key = layer.rotated(layer.k.row(head / 2, position), &of == &view ? 0 : j - position);
        const double cosine =
            std::inner_product(key.begin(), key.end(), anchor.begin(), 0.0) / length(key) / length(anchor);
        weights.push_back(j < first ? -HUGE_VAL : tau * cosine);
        values.push_back(layer.v.row(head / 2, position));
      }
      const double most = std::ranges::max(weights);
      for (double& weight : weights) weight = std::exp(weight - most);
      for (std::size_t j = 0; j < weights.size(); ++j) {
        std::vector<Numbers> system(dim, Numbers(dim + 1));
        for (std::size_t r = 0; r < dim; ++r) {
          system[r][r] = 1;
          system[r][dim] = values[j][r];
          for (std::size_t i = 0; i < weights.size(); ++i)
            for (std::size_t c = 0; c < dim && weights[i] > 0; ++c)
              system[r][c] += (weights[i] + epsilon) * values[i][r] * values[i][c];
        }
        const Numbers solved = solve(system);
        per_head(head, static_cast<int>(j)) =
            weights[j] * std::inner_product(solved.begin(), solved.end(), values[j].begin(), 0.0);
      }
    }
    Matrix scores = Grouping{}(per_head, 2);
    for (int row = 0; row < 2; ++row)
      for (int j = 0; j < first; ++j) scores(row, j) = std::ranges::max(scores.row(row));
    return scores;
  };
  expect_near(scores("cap-kv:sinks=3,tau=2,epsilon=0.1,future=5"), expected(view, 3, 2, 0.1, 5), 1e-9);
  expect_near(scores("cap-kv"), expected(view, 4, 5, 1e-6, 512), 1e-9);
  expect_near(scores("cap-kv:sinks=1,future=7", held), expected(held, 1, 5, 1e-6, 7), 1e-9);
}

TEST_P(ScoresOf, OfKeyDiffAndKnormAreWhatStaysFirst) {
  const Matrix found = scores("keydiff", held), of_anchor = cosines(held.keys(), mean_direction(held.keys(), 1), 1);
  for (int i = 0; i < 12; ++i) EXPECT_EQ(found(1, i), -of_anchor(1, i));
  const Matrix norms = scores("knorm", held);
  for (int i = 0; i < 12; ++i) {
    const Numbers key = layer.k.row(1, held.positions(1)[i].number);
    EXPECT_NEAR(norms(1, i), -std::sqrt(std::inner_product(key.begin(), key.end(), key.begin(), 0.0)), 1e-6);
  }
}

TEST_P(ScoresOf, CurDividesByTheBlockOfWhatIsHeld) {
  const auto square = [](const Numbers& x) { return std::inner_product(x.begin(), x.end(), x.begin(), 0.0); };
  for (int i = 0; i < 12; ++i) {
    double keys = 0, values = 0;
    for (int other = i / 5 * 5; other < std::min(i / 5 * 5 + 5, 12); ++other) {
      const int position = held.positions(1)[other].number;
      keys += square(layer.k.row(1, position));
      values += square(layer.v.row(1, position));
    }
    const int position = held.positions(1)[i].number;
    const double key = square(layer.k.row(1, position)) / keys, value = square(layer.v.row(1, position)) / values;
    EXPECT_NEAR(scores("cur:block=5", held)(1, i), key * value, 1e-6);
    EXPECT_NEAR(scores("cur:block=5,use=key", held)(1, i), key, 1e-6);
    EXPECT_NEAR(scores("cur:block=5,use=value", held)(1, i), value, 1e-6);
    EXPECT_NEAR(scores("cur:block=5,use=avg", held)(1, i), (key + value) / 2, 1e-6);
  }
}

TEST_P(ScoresOf, CurIsEqualWhereProductsOfWholeNumbersAre) {
  const int divisors[] = {1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60};
  const auto give_square = [&](RandomTensor& tensor, int j, int square) {
    for (int c = 0; c < dim; ++c) {
      const int number = static_cast<int>(std::sqrt(square));
      tensor.set(0, j, c, static_cast<float>(number));
      square -= number * number;
    }
  };
  for (int j = 0; j < prompt; ++j) {
    give_square(layer.k, j, divisors[j % 12]);
    give_square(layer.v, j, 60 / divisors[j % 12]);
  }
  const Matrix found = scores("cur:block=41");
  for (int j = 1; j < prompt; ++j) EXPECT_EQ(found(0, j), found(0, 0)) << j;
}

TEST_P(ScoresOf, LagKvRanksWithinPartitions) {
  // 41 tokens, 3 sinks: partitions of 8 begin at 3, 11, 19, 27; the last whole one and the tail are not ranked.
  const Matrix found = scores("lagkv:sinks=3,lag=8");
  const Matrix of_keys = lag_deviations(view.keys(), 3, 8, 1),
               of_values = lag_deviations(view.stored_values(), 3, 8, 1);
  const auto share = [](const Matrix& deviations, int row, int j, int first) {
    double sum = 0;
    for (int i = first; i < first + 8; ++i) sum += std::exp(deviations(row, i));
    return std::exp(deviations(row, j)) / sum;
  };
  for (int row = 0; row < 2; ++row)
    for (int j = 0; j < prompt; ++j) {
      if (j < 3 || j >= 27) {
        EXPECT_EQ(found(row, j), 1.0) << j;
        continue;
      }
      const int first = 3 + (j - 3) / 8 * 8;
      const auto score = [&](int i) { return share(of_keys, row, i, first) + share(of_values, row, i, first); };
      int below = 0;
      for (int i = first; i < first + 8; ++i) below += score(i) < score(j) ? 1 : 0;
      EXPECT_EQ(found(row, j), below / 8.0) << j;
    }
}

TEST(LagKv, OfEqualTokensTheFirstRanksHighest) {
  RandomTensor same(1, 6, 2, DType::float32, 0.0, 1);
  const LayerTensors tensors{.q = same.view(), .k = same.view(), .v = same.view(), .query_positions = {}, .rope = {}};
  const auto backend = tested_backend(1);
  const std::vector<std::int32_t> eval{5};
  const LayerView view(*backend, tensors, {.prompt = 6}, eval);
  const Matrix found = plan_of("lagkv:sinks=0,lag=3").score.score(view, {});
  EXPECT_EQ(std::vector<double>(found.row(0).begin(), found.row(0).end()),
            (std::vector<double>{2.0 / 3, 1.0 / 3, 0, 1, 1, 1}));
}

TEST(LagKv, OfTokensTooFewToCompareTheMostRecentScoreHighest) {
  RandomTensor some(1, 12, 2, DType::float32, 1.0, 1);
  const LayerTensors tensors{.q = some.view(), .k = some.view(), .v = some.view(), .query_positions = {}, .rope = {}};
  const auto backend = tested_backend(1);
  const std::vector<std::int32_t> eval{11};
  const Plan plan = plan_of("lagkv:sinks=2,lag=5");
  EXPECT_EQ(plan.protect.sinks, 2);
  const LayerView eleven(*backend, tensors, {.prompt = 11}, eval), twelve(*backend, tensors, {.prompt = 12}, eval);
  for (int j = 0; j < 11; ++j) EXPECT_EQ(plan.score.score(eleven, {.sinks = 2})(0, j), j);
  EXPECT_EQ(plan.score.score(twelve, {.sinks = 2})(0, 11), 1.0) << "two whole partitions behind the sinks";
}

TEST(ZScores, OfEqualNumbersAreZero) {
  const Matrix equal = z_scores(Matrix(2, 3, 0.1));
  for (const double score : equal.values()) EXPECT_EQ(score, 0.0);
  Matrix two(2, 1);
  two(0, 0) = 1;
  two(1, 0) = 5;
  EXPECT_EQ(z_scores(two)(0, 0), -1.0) << "over all rows together";
}

TEST(ScoreKeys, HoldTheBudgetWhereTheScoreDependsOnIt) {
  const auto key = [](const char* policy, int budget) { return score_key(plan_of(policy), {.budget = budget}); };
  EXPECT_NE(key("compactor", 5), key("compactor", 6));
  EXPECT_EQ(key("compactor:mix=0.5", 5), key("compactor:mix=0.5", 6));
  EXPECT_EQ(key("leverage", 5), key("leverage", 6));
}

}  // namespace
}  // namespace kvreplay::testing
