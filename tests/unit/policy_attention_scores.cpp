// Scores made of attention, against loops over a random layer's softmax rows in float64.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "attention_reference.h"
#include "fake_backend.h"
#include "policies/scores/attention_counts.h"
#include "policies/scores/attention_scores.h"
#include "policies/scores/recency_window.h"
#include "policies/scores/window_score.h"
#include "policies/selectors/sampled.h"
#include "policies/text/configured.h"

namespace kvreplay::testing {
namespace {

/// A random layer of P = 40 prompt tokens and 6 more, two query heads a KV head.
class AttentionScores : public ::testing::TestWithParam<int> {
 protected:
  static constexpr int prompt = 40;

  const RandomLayer layer{{.tokens = 46, .spread = 1.5, .sliding_window = GetParam()}};
  const std::unique_ptr<Backend> backend = tested_backend(2);
  const std::vector<std::int32_t> eval = range(prompt, 46);
  const LayerTensors tensors = layer.tensors();
  const LayerView view{*backend, tensors, {.layers = 3, .stored_layer = 2, .prompt = prompt}, eval};

  /// a(t, j) of query head h.
  double attention(int head, int t, int j) const { return rows_[static_cast<std::size_t>(head)](t, j); }

  template <class Expected>
  static void expect_scores(const Matrix& found, int rows, Expected expected) {
    ASSERT_EQ(found.rows(), rows);
    ASSERT_EQ(found.columns(), prompt);
    for (int row = 0; row < rows; ++row)
      for (int j = 0; j < prompt; ++j)
        ASSERT_NEAR(found(row, j), expected(row, j), 1e-5 * (1 + std::abs(expected(row, j)))) << row << ", " << j;
  }

 private:
  void SetUp() override {
    for (int head = 0; head < 4; ++head) {
      Matrix& rows = rows_.emplace_back(46, 46);
      for (int t = 0; t < 46; ++t) {
        const std::vector<double> z = layer.logits(head, t);
        std::ranges::copy(softmax(z), rows.row(t).begin());
      }
    }
  }

  std::vector<Matrix> rows_;  // [query head], [t, j]
};

INSTANTIATE_TEST_SUITE_P(Windows, AttentionScores, ::testing::Values(0, 9));

TEST_P(AttentionScores, ObservedIsTheMeanOfTheQueriesThatSeeAToken) {
  expect_scores(observed_score().score(view, {}), 2, [&](int kv_head, int j) {
    double sum = 0;
    int queries = 0;
    for (int t = 0; t < prompt; ++t) {
      if (!layer.visible(t, j)) continue;
      ++queries;
      sum += (attention(2 * kv_head, t, j) + attention(2 * kv_head + 1, t, j)) / 2;
    }
    return sum / queries;
  });
}

TEST_P(AttentionScores, ObservedOfThoseHeldCountsTheQueriesSinceTheyCame) {
  // Tokens 3 and 5 were held when 10 and 11 came, and have 0.5 of what came before.
  const LayerView held(view,
                       {.positions = {3, 5, 10, 11}, .seen = 12, .added = 2, .attention_before = Matrix(4, 2, 0.5)});
  const Matrix all = cumulative_score().score(held, {}), means = observed_score().score(held, {});
  const int came[] = {9, 7, 2, 1};
  for (int row = 0; row < 2; ++row)
    for (int i = 0; i < 4; ++i) {
      const int queries = GetParam() == 0 ? came[i] : std::min(came[i], GetParam());
      EXPECT_DOUBLE_EQ(means(row, i), all(row, i) / queries) << row << ", " << i;
    }
}

TEST_P(AttentionScores, SumsOverQueriesAreDistributionsOnceDivided) {
  const Scoring of_heads{.grouping = {.heads = Heads::query}, .recent = 5, .observing = 5};
  const Scorer sums[] = {
      cumulative_score(),
      WindowScore{.window = 6, .pool = Pool::none}.scorer(),
      WindowScore{.window = 99, .pool = Pool::none}.scorer(),
      AttentionCounts{.history = 7, .binary = false}.scorer(),
      AttentionCounts{.history = 99, .binary = false}.scorer(),
      RecencyWindow{.distance_weight = 1}.scorer(),
      RecencyWindow{.distance_weight = 3}.scorer(),
  };
  for (const Scorer& scorer : sums) {
    const Matrix scores = scorer.score(view, of_heads);
    const double queries = scorer.queries(view, of_heads);
    for (int head = 0; head < scores.rows(); ++head) {
      const std::span<const double> row = scores.row(head);
      EXPECT_NEAR(std::accumulate(row.begin(), row.end(), 0.0) / queries, 1, 1e-5) << scorer.name << ", " << head;
    }
  }
  for (const Scorer& scorer : {observed_score(), newest_score(), AttentionCounts{}.scorer()})
    EXPECT_FALSE(scorer.queries) << scorer.name;
}

TEST_P(AttentionScores, CriticalKvAddsItsConstantToMeansOverQueries) {
  const auto scorer = [](const std::string& policy) {
    return ConfiguredPolicy::parse(policy).plans(3).front().plan.score;
  };
  const Scoring how{.recent = 2, .budget = 10, .observing = 2};
  const std::pair<std::string, double> bases[] = {
      {"snapkv:window=4", 4},
      {"snapkv:window=50,pool=avg", prompt},
      {"h2o", prompt},
      {"h2o:score=recency-window,distance_weight=2.0", 3},  // 1 and 2: the queries of the two recent tokens
      {"observed-attention", 1},
      {"knorm", 1},
  };
  for (const auto& [base, queries] : bases) {
    const Matrix of_base = scorer(base).score(view, how);
    const Matrix found = scorer("critical-kv:wo=none,base=(" + base + ")").score(view, how);
    int infinite = 0;
    for (int row = 0; row < 2; ++row)
      for (int j = 0; j < prompt; ++j) {
        const double expected = (of_base(row, j) / queries + 1e-4) * view.value_norms(1)(row, j);
        if (std::isinf(found(row, j))) {
          ++infinite;
        } else {
          EXPECT_DOUBLE_EQ(found(row, j), expected) << base << ", " << row << ", " << j;
        }
      }
    EXPECT_EQ(infinite, 2 * (10 / 2 - 2)) << base;
  }
}

TEST_P(AttentionScores, NewestIsTheAttentionOfTheLastQuerySummedOverAllHeads) {
  const Scoring layer_wide{.grouping = {.heads = Heads::layer}};
  expect_scores(newest_score().score(view, layer_wide), 1, [&](int, int j) {
    double sum = 0;
    for (int head = 0; head < 4; ++head) sum += attention(head, prompt - 1, j);
    return sum;
  });
}

TEST_P(AttentionScores, CountsOrderTokensByVotesThenBySumThenByPosition) {
  constexpr int history = 12;
  const auto votes = [&](int kv_head, int j) {
    double count = 0, sum = 0;
    for (int t = prompt - history; t < prompt; ++t)
      for (const int head : {2 * kv_head, 2 * kv_head + 1}) {
        int seen = 0;
        for (int key = 0; key <= t; ++key) seen += layer.visible(t, key) ? 1 : 0;
        count += attention(head, t, j) > (1 + 1e-6) / seen ? 1 : 0;
        sum += attention(head, t, j);
      }
    return std::pair(count, sum);
  };
  const Matrix scores = AttentionCounts{.history = history}.scorer().score(view, {});
  int ties = 0;
  for (int row = 0; row < 2; ++row)
    for (int i = 0; i < prompt; ++i) {
      EXPECT_EQ(std::floor(scores(row, i)), votes(row, i).first) << row << ", " << i;
      for (int j = i + 1; j < prompt; ++j) {
        const auto [count_i, sum_i] = votes(row, i);
        const auto [count_j, sum_j] = votes(row, j);
        ties += count_i == count_j ? 1 : 0;
        ASSERT_NE(scores(row, i), scores(row, j)) << "places in an order differ";
        if (sum_i == 0 && sum_j == 0) {
          EXPECT_GT(scores(row, i), scores(row, j)) << "of equals the lower position: " << i << ", " << j;
        } else if (count_i != count_j || std::abs(sum_i - sum_j) > 1e-5) {
          EXPECT_EQ(scores(row, i) > scores(row, j), std::pair(count_i, sum_i) > std::pair(count_j, sum_j))
              << row << ": " << i << ", " << j;
        }
      }
    }
  EXPECT_GT(ties, 20) << "or the sums would decide nothing";

  expect_scores(AttentionCounts{history, false}.scorer().score(view, {}), 2,
                [&](int row, int j) { return votes(row, j).second; });
}

class SampledRows : public ::testing::Test {
 protected:
  const RandomLayer layer{{.tokens = 30}};
  FakeBackend backend;
  const LayerTensors tensors = layer.tensors();
  const LayerView view{backend, tensors, {.layers = 3, .stored_layer = 7, .prompt = 30}, {}};
};

TEST_F(SampledRows, AreTheBestAndTheLargestPerturbedScoresOfTheRest) {
  std::vector<double> scores;
  for (int j = 0; j < 30; ++j) scores.push_back(3 * uniform(chain(11, j)));
  for (const auto& [share, temperature] : {std::pair{0.3, 1.0}, {0.5, 0.2}, {1.0, 5.0}, {0.0, 1.0}})
    for (const int number : {0, 1}) {
      const Sampled part{share, temperature, 5};
      const Row row{scores, 30, 14, 2, 3, &view, number};
      std::set<std::int32_t> expected{0, 1, 27, 28, 29};
      std::vector<std::pair<double, std::int32_t>> rest;  // minus the score, token
      for (int j = 2; j < 27; ++j) rest.emplace_back(-scores[static_cast<std::size_t>(j)], j);
      std::sort(rest.begin(), rest.end());
      const int drawn = static_cast<int>(std::floor(share * 9));
      for (int i = 0; i < 9 - drawn; ++i) expected.insert(rest[static_cast<std::size_t>(i)].second);
      rest.erase(rest.begin(), rest.begin() + (9 - drawn));
      for (auto& [key, j] : rest) {
        const double u = (static_cast<double>(chain(5, 7, number, j) >> 11) + 0.5) * std::ldexp(1.0, -53);
        key = -(scores[static_cast<std::size_t>(j)] / temperature - std::log(-std::log(u)));
      }
      std::sort(rest.begin(), rest.end());
      for (int i = 0; i < drawn; ++i) expected.insert(rest[static_cast<std::size_t>(i)].second);
      const Kept kept = part.selector()(row);
      EXPECT_EQ(std::set(kept.positions.begin(), kept.positions.end()), expected) << share << ", row " << number;
      EXPECT_TRUE(std::is_sorted(kept.positions.begin(), kept.positions.end()));
      EXPECT_EQ(kept.positions.size(), 14U);
      EXPECT_EQ(std::pair(kept.sinks, kept.recent), std::pair(2, 3));
    }
}

TEST_F(SampledRows, ASingleDrawHasTheProbabilitiesOfTheSoftmax) {
  const std::vector<double> scores{1.0, 0.0, 2.0, 1.5, -1.0}, expected = softmax({0.5, 0.0, 1.0, 0.75, -0.5});
  constexpr int draws = 20000;
  std::map<std::int32_t, int> drawn;
  for (std::uint64_t seed = 0; seed < draws; ++seed)
    ++drawn[Sampled{1.0, 2.0, seed}.selector()({scores, 5, 1, 0, 0, &view, 0}).positions.front()];
  for (int j = 0; j < 5; ++j) {
    const double p = expected[static_cast<std::size_t>(j)];
    EXPECT_NEAR(drawn[j], draws * p, 4 * std::sqrt(draws * p * (1 - p))) << j;
  }
}

}  // namespace
}  // namespace kvreplay::testing
