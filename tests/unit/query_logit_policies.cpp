// Policies that read the logits of single queries, and controls by use, written out from their definitions.

#include <gtest/gtest.h>

#include <set>

#include "attention_reference.h"
#include "policies/text/configured.h"

namespace kvreplay::testing {
namespace {

using Numbers = std::vector<double>;

class QueryLogitPolicies : public ::testing::Test {
 protected:
  static constexpr int prompt = 41, group = 2, kv_heads = 2;

  static Plan plan_of(const std::string& policy) { return ConfiguredPolicy::parse(policy).plans(2).front().plan; }

  Matrix scores(const Plan& plan, const LayerView& of, int budget) const {
    const Protection::Clamped by_rule = plan.protect.within(budget, of.prompt(), {});
    return plan.score.score(
        of, {.grouping = plan.grouping, .recent = by_rule.recent, .budget = budget, .sinks = by_rule.sinks});
  }
  Matrix scores(const std::string& policy, int budget = 20) const { return scores(plan_of(policy), view, budget); }

  /// Kept tokens of a row.
  std::vector<std::int32_t> kept(const std::string& policy, int row, int budget) const {
    const Plan plan = plan_of(policy);
    const Protection::Clamped by_rule = plan.protect.within(budget, prompt, {});
    const Matrix all = scores(plan, view, budget);
    return plan.select({all.row(row), prompt, budget, by_rule.sinks, by_rule.recent, &view, row}).positions;
  }

  /// Logits of query t over the first tokens.
  Numbers logits(int head, int t, int tokens) const {
    Numbers z = layer.logits(head, t);
    z.resize(static_cast<std::size_t>(tokens));
    return z;
  }

  static void expect_near(const Matrix& found, int row, const Numbers& expected) {
    for (std::size_t j = 0; j < expected.size(); ++j)
      EXPECT_NEAR(found(row, static_cast<int>(j)), expected[j], 2e-7 + 1e-6 * std::abs(expected[j]))
          << row << ", " << j;
  }

  RandomLayer layer{{.query_heads = 4, .kv_heads = kv_heads, .tokens = 60, .spread = 1.5, .softcap = 20.0F}};
  const std::vector<std::int32_t> eval = range(prompt, 60);
  const LayerTensors tensors = layer.tensors();
  std::unique_ptr<Backend> backend = tested_backend(2);
  const LayerView view{*backend, tensors, {.stored_layer = 3, .prompt = prompt}, eval};
};

Numbers pooled_maximum(const Numbers& row, int kernel) {
  Numbers pooled;
  for (int j = 0; j < static_cast<int>(row.size()); ++j) {
    double most = -HUGE_VAL;
    for (int i = std::max(0, j - kernel / 2); i <= std::min(static_cast<int>(row.size()) - 1, j + kernel / 2); ++i)
      most = std::max(most, row[static_cast<std::size_t>(i)]);
    pooled.push_back(most);
  }
  return pooled;
}

TEST_F(QueryLogitPolicies, RKvSubtractsTheRedundancyOfKeysFromTheAttentionBeforeTheWindow) {
  constexpr int window = 5, before = prompt - window;
  constexpr double lambda = 0.3;
  for (const double threshold : {0.2, 0.5, 0.99}) {
    const Matrix found = scores("r-kv:window=5,kernel=3,mix_lambda=0.3,threshold=" + std::to_string(threshold));
    for (int c = 0; c < kv_heads; ++c) {
      Numbers attention(before);
      for (int t = before; t < prompt; ++t) {
        const Numbers first = logits(2 * c, t, before), second = logits(2 * c + 1, t, before);
        Numbers largest;
        for (std::size_t j = 0; j < before; ++j) largest.push_back(std::max(first[j], second[j]));
        largest = softmax(largest);
        for (std::size_t j = 0; j < before; ++j) attention[j] += largest[j] / window;
      }
      attention = pooled_maximum(attention, 3);

      Numbers received(prompt);
      int cleared_first = 0;
      for (int i = 0; i < prompt; ++i) {
        Numbers row(prompt);
        int cleared = 0;
        for (int j = 0; j < prompt; ++j) {
          const Numbers a = layer.k.row(c, i), b = layer.k.row(c, j);
          const auto product = [](const Numbers& x, const Numbers& y) {
            return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
          };
          if (i != j)
            row[static_cast<std::size_t>(j)] =
                product(a, b) / (std::sqrt(product(a, a)) + 1e-8) / (std::sqrt(product(b, b)) + 1e-8);
          if (row[static_cast<std::size_t>(j)] > threshold) cleared = j;
        }
        cleared_first += cleared == 0 ? 1 : 0;
        row[static_cast<std::size_t>(cleared)] = 0;
        for (std::size_t j = 0; j < prompt; ++j) received[j] += row[j] / prompt;
      }
      EXPECT_TRUE(cleared_first > 0 || threshold < 0.9) << "no row without a similar key";
      const Numbers redundancy = softmax(received);
      Numbers expected;
      for (std::size_t j = 0; j < before; ++j) expected.push_back(lambda * attention[j] - (1 - lambda) * redundancy[j]);
      expect_near(found, c, expected);
    }
  }
}

/// The last queries of the window see no token before it.
TEST_F(QueryLogitPolicies, RKvUnderASlidingWindowShorterThanItsOwn) {
  constexpr int window = 8, before = prompt - window, sliding = 4;
  const RandomLayer narrow({.query_heads = 4, .kv_heads = kv_heads, .tokens = 60, .sliding_window = sliding});
  const LayerTensors of_narrow = narrow.tensors();
  const LayerView seen(*backend, of_narrow, {.stored_layer = 3, .prompt = prompt}, eval);
  const Matrix found = scores(plan_of("r-kv:window=8,kernel=1,mix_lambda=1"), seen, 20);
  for (int c = 0; c < kv_heads; ++c) {
    Numbers expected(before);
    for (int t = before; t < prompt; ++t) {
      const Numbers a = narrow.logits(2 * c, t), b = narrow.logits(2 * c + 1, t);
      double sum = 0;
      const auto weight = [&](int j) {
        return std::exp(std::max(a[static_cast<std::size_t>(j)], b[static_cast<std::size_t>(j)]));
      };
      for (int j = t - sliding + 1; j < before; ++j) sum += weight(j);
      for (int j = t - sliding + 1; j < before; ++j) expected[static_cast<std::size_t>(j)] += weight(j) / sum / window;
    }
    EXPECT_GT(expected.back(), 0.1);
    expect_near(found, c, expected);
  }
}

TEST_F(QueryLogitPolicies, RKvProtectsItsWindow) {
  const std::vector<std::int32_t> some = kept("r-kv", 0, 12);
  EXPECT_EQ(some.size(), 12U);
  EXPECT_EQ(std::vector<std::int32_t>(some.end() - 8, some.end()), range(prompt - 8, prompt));
}

class Vase : public QueryLogitPolicies {
 protected:
  static constexpr int window = 7, before = prompt - window;

  Numbers value_ranges(int c) const {
    Numbers ranges;
    for (int j = 0; j < prompt; ++j) {
      const Numbers value = layer.v.row(c, j);
      ranges.push_back(std::ranges::max(value) - std::ranges::min(value));
    }
    return ranges;
  }

  /// Mean over queries and group, average pool of 5 with zeros outside.
  Numbers attention(int c, double temperature) const {
    Numbers mean(before), smooth(before);
    for (int head = group * c; head < group * (c + 1); ++head)
      for (int t = before; t < prompt; ++t) {
        Numbers z = logits(head, t, before);
        for (double& logit : z) logit /= temperature;
        z = softmax(z);
        for (std::size_t j = 0; j < before; ++j) mean[j] += z[j] / window / group;
      }
    for (int j = 0; j < before; ++j)
      for (int i = std::max(0, j - 2); i <= std::min(before - 1, j + 2); ++i)
        smooth[static_cast<std::size_t>(j)] += mean[static_cast<std::size_t>(i)] / 5;
    return smooth;
  }
};

TEST_F(Vase, SamplesByAttentionBesideTheLargestValues) {
  constexpr int budget = 24, large = 8, sinks = 3;
  const std::string policy = "vase:window=7,large=0.35,sinks=3,temperature=1.5,seed=9";
  for (int c = 0; c < kv_heads; ++c) {
    const Numbers ranges = value_ranges(c), weights = attention(c, 1.5);
    std::vector<std::int32_t> rest = range(sinks, before);
    const auto take = [&](int count, auto rank) {
      std::ranges::sort(rest, std::greater(), [&](std::int32_t j) { return std::pair(rank(j), -j); });
      const std::vector<std::int32_t> best(rest.begin(), rest.begin() + count);
      rest.erase(rest.begin(), rest.begin() + count);
      return best;
    };
    std::vector<std::int32_t> expected = range(0, sinks);
    std::ranges::copy(range(before, prompt), std::back_inserter(expected));
    std::ranges::copy(take(large - sinks, [&](std::int32_t j) { return ranges[static_cast<std::size_t>(j)]; }),
                      std::back_inserter(expected));
    std::ranges::copy(take(budget - window - large,
                           [&](std::int32_t j) {
                             const double u = uniform(chain(9, 3, c, j));
                             return std::log(weights[static_cast<std::size_t>(j)]) - std::log(-std::log(u));
                           }),
                      std::back_inserter(expected));
    std::ranges::sort(expected);
    EXPECT_EQ(kept(policy, c, budget), expected);
  }
  EXPECT_NE(kept(policy, 0, budget), kept("vase:window=7,large=0.35,sinks=3,temperature=1.5,seed=10", 0, budget));
}

TEST_F(Vase, DrawsAnewAtEachFurtherEviction) {
  const auto drawn_at = [&](int seen) {
    const std::vector<std::int32_t> positions = range(0, 20);
    const LayerView held(view, {.positions = positions, .rows = 1, .seen = seen, .added = 2});
    const Plan plan = plan_of("vase:window=1,large=0,sinks=0");
    const Numbers equal(20, 1.0);
    return plan.select({equal, 20, 8, 0, 1, &held, 0}).positions;
  };
  EXPECT_NE(drawn_at(20), drawn_at(30));
  EXPECT_EQ(drawn_at(30), drawn_at(30));
}

class ControlsByUse : public QueryLogitPolicies {
 protected:
  struct Uses {
    Numbers counts = Numbers(prompt), last = {};
  };
  Uses uses(int c) const {
    Uses all;
    for (int j = 0; j < prompt; ++j) all.last.push_back(j);
    for (int t = 0; t < prompt; ++t) {
      Numbers sum(prompt);
      for (int head = group * c; head < group * (c + 1); ++head) {
        const Numbers attention = softmax(logits(head, t, prompt));
        std::ranges::transform(sum, attention, sum.begin(), std::plus());
      }
      for (std::size_t j = 0; j < static_cast<std::size_t>(t); ++j)
        if (sum[j] / group > (1 + 1e-6) / (t + 1)) {
          all.counts[j] += 1;
          all.last[j] = t;
        }
    }
    return all;
  }
};

TEST_F(ControlsByUse, LruRanksByTheLastQueryThatUsesATokenMoreThanTheAverage) {
  const Matrix found = scores("lru");
  for (int c = 0; c < kv_heads; ++c) expect_near(found, c, uses(c).last);
}

TEST_F(ControlsByUse, LfuRanksByTheNumberOfUsesThenByTheLastOne) {
  const Matrix found = scores("lfu");
  for (int c = 0; c < kv_heads; ++c) {
    const Uses all = uses(c);
    for (int j = 0; j < prompt; ++j) {
      EXPECT_EQ(std::floor(found(c, j)), all.counts[static_cast<std::size_t>(j)]);
      for (int i = 0; i < j; ++i) {
        const auto a = static_cast<std::size_t>(i), b = static_cast<std::size_t>(j);
        if (all.counts[a] == all.counts[b]) {
          EXPECT_EQ(found(c, i) > found(c, j), all.last[a] >= all.last[b]) << i << ", " << j;
        }
      }
    }
  }
}

TEST_F(ControlsByUse, TheNewestTokenIsKept) {
  for (const char* policy : {"lru", "lfu"}) EXPECT_EQ(kept(policy, 0, 1), (std::vector<std::int32_t>{prompt - 1}));
}

TEST_F(ControlsByUse, EqualLogitsUseNoToken) {
  RandomTensor same(1, 6, 2, DType::float32, 0.0, 1);
  const LayerTensors equal{.q = same.view(), .k = same.view(), .v = same.view(), .query_positions = {}, .rope = {}};
  const LayerView of_equal(*backend, equal, {.prompt = 6}, eval);
  expect_near(plan_of("lru").score.score(of_equal, {}), 0, {0, 1, 2, 3, 4, 5});
}

TEST_F(QueryLogitPolicies, KeyformerAddsGumbelNoiseToTheLogits) {
  const Matrix found = scores("keyformer:tau=2,seed=5,heads=query");
  for (int head = 0; head < 4; ++head) {
    Numbers sums(prompt);
    for (int t = 0; t < prompt; ++t) {
      Numbers z = logits(head, t, prompt);
      for (int j = 0; j <= t; ++j)
        z[static_cast<std::size_t>(j)] =
            (z[static_cast<std::size_t>(j)] - std::log(-std::log(uniform(chain(5, 3, head, t, j))))) / 2;
      z = softmax(z);
      for (std::size_t j = 0; j < prompt; ++j) sums[j] += z[j];
    }
    expect_near(found, head, sums);
  }
  const Matrix of_groups = scores("keyformer:tau=2,seed=5");
  EXPECT_NEAR(of_groups(1, 7), (found(2, 7) + found(3, 7)) / 2, 1e-12);
}

TEST_F(QueryLogitPolicies, KeyformersCodeEvictsTheFirstRecentToken) {
  const std::vector<std::int32_t> all = kept("keyformer", 1, 20), some = kept("keyformer:gap=true", 1, 20);
  EXPECT_EQ(all.size(), 20U);
  ASSERT_EQ(some.size(), 19U);
  EXPECT_EQ(std::ranges::find(some, prompt - 6), some.end());
  EXPECT_TRUE(std::ranges::includes(all, some));
}

TEST_F(QueryLogitPolicies, OfCachePositionsReadQueriesAtTheirSlots) {
  RandomLayer moving{{.query_heads = 4, .kv_heads = 2, .tokens = 60, .rope_pairs = 3}};
  const LayerTensors rotated = moving.tensors();
  const LayerView whole(*backend, rotated, {.stored_layer = 3, .prompt = prompt}, eval);
  const std::vector<std::int32_t> positions{0, 2, 3, 5, 8, 11, 13, 17, 21, 22, 28, 29};
  const LayerView held(whole, {.positions = positions, .rows = 1, .seen = 30, .added = 2, .place = Positions::cache});
  const Plan plan = plan_of("r-kv:window=2,mix_lambda=1,kernel=1");
  const Matrix found = plan.score.score(held, {.recent = 2});
  Numbers expected(10);
  for (const int t : {28, 29}) {
    const int slot = t - 18;
    Numbers largest(10, -HUGE_VAL);
    for (int head = 0; head < 2; ++head) {
      const Numbers query = moving.rotated(moving.query(head, t), slot - t);
      for (int i = 0; i < 10; ++i) {
        const int j = positions[static_cast<std::size_t>(i)];
        double& most = largest[static_cast<std::size_t>(i)];
        most = std::max(most, moving.logit(query, moving.rotated(moving.k.row(0, j), i - j)));
      }
    }
    const Numbers shares = softmax(largest);
    for (std::size_t i = 0; i < shares.size(); ++i) expected[i] += shares[i] / 2;
  }
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found(0, static_cast<int>(i)), expected[i], 1e-6) << i;
}

/// A layer whose window attention, of one query after 12 tokens, is in proportion to `weights` [2][12].
class Representatives : public ::testing::Test {
 protected:
  static constexpr int tokens = 13;

  std::vector<std::int32_t> kept(const std::string& policy, int row, int budget) const {
    RandomTensor q(2, tokens, 1, DType::float32, 0.0, 1), k(2, tokens, 1, DType::float32, 0.0, 1);
    for (int head = 0; head < 2; ++head) {
      q.set(head, tokens - 1, 0, 1);
      for (int j = 0; j < tokens - 1; ++j)
        k.set(head, j, 0,
              static_cast<float>(std::log(weights[static_cast<std::size_t>(head)][static_cast<std::size_t>(j)])));
    }
    const LayerTensors tensors{.q = q.view(), .k = k.view(), .v = k.view(), .query_positions = {}, .rope = {}};
    const std::vector<std::int32_t> eval{tokens - 1};
    const std::unique_ptr<Backend> backend = tested_backend(1);
    const LayerView view(*backend, tensors, {.prompt = tokens}, eval);
    const Plan plan = ConfiguredPolicy::parse(policy).plans(1).front().plan;
    const Protection::Clamped by_rule = plan.protect.within(budget, tokens, {});
    const Matrix all = plan.score.score(
        view, {.grouping = plan.grouping, .recent = by_rule.recent, .budget = budget, .sinks = by_rule.sinks});
    return plan.select({all.row(row), tokens, budget, by_rule.sinks, by_rule.recent, &view, row}).positions;
  }

  // Pages of two tokens. The better half is 0 1 3 6 7 9 in the first head, and 1 2 3 4 9 10 in the second. Bits, token
  // by token: 1011 0111 0100 1010 0011 0100; their majority is 0010, since a tie counts as 0.
  const std::vector<Numbers> weights{{20, 19, 1, 8, 2, 3, 12, 11, 3.5, 9, 2.5, 1.5},
                                     {1, 9.1, 8, 9.2, 9.3, 2, 1.1, 3, 2.1, 9.4, 9.5, 1.2}};
};

TEST_F(Representatives, ArePagesAtEqualStepsOfTheirDistanceToTheAnchor) {
  // Page sums of the first head: 39 9 5 23 12.5 4. The window has 1 of 8 slots, representatives 4, the best pages 3:
  // tokens 0, 1 and 6. Of the pages 1 2 4 5 every second one, by distance, is a representative.
  using Kept = std::vector<std::int32_t>;
  const std::string policy = "kvcrush:window=1,page=2,ratio=0.6,anchor=";
  EXPECT_EQ(kept(policy + "zeros", 0, 8), (Kept{0, 1, 4, 5, 6, 8, 9, 12})) << "distances 3 1 2 1";
  EXPECT_EQ(kept(policy + "ones", 0, 8), (Kept{0, 1, 2, 3, 4, 5, 6, 12})) << "distances 1 3 2 3";
  EXPECT_EQ(kept(policy + "mean", 0, 8), (Kept{0, 1, 4, 5, 6, 8, 9, 12})) << "distances 2 2 1 2";
  EXPECT_EQ(kept(policy + "alternating", 0, 8), (Kept{0, 1, 2, 3, 6, 10, 11, 12})) << "distances 1 1 2 1";
  // Page sums 10.1 17.2 11.3 4.1 11.5 10.7: tokens 2, 3 and 8; the pages 0 2 3 5 remain.
  EXPECT_EQ(kept(policy + "zeros", 1, 8), (Kept{2, 3, 4, 5, 6, 7, 8, 12})) << "distances 3 1 2 1";
  EXPECT_EQ(kept(policy + "mean", 1, 8), (Kept{2, 3, 4, 5, 6, 7, 8, 12})) << "distances 2 2 1 2";
  // One row: bits 11 01 00 01 01 10, tokens 0, 1 and 2, then every second of the pages 2 3 4 5.
  EXPECT_EQ(kept(policy + "zeros,heads=layer", 0, 8), (Kept{0, 1, 2, 4, 5, 8, 9, 12})) << "distances 0 1 1 1";
}

TEST_F(Representatives, LeaveSlotsThatTheBestPagesFill) {
  // Pages 0-4, 5-9 and 10-11: the short page is no representative.
  EXPECT_EQ(kept("kvcrush:window=1,page=5,ratio=1", 0, 12),
            (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12}));
  EXPECT_EQ(kept("kvcrush:window=1,page=5,ratio=0", 0, 4), (std::vector<std::int32_t>{0, 1, 2, 12}));
}

TEST_F(Representatives, ARandomAnchorDependsOnTheSeed) {
  std::set<std::vector<std::int32_t>> all;
  for (int seed = 0; seed < 8; ++seed)
    all.insert(kept("kvcrush:window=1,page=2,ratio=0.6,anchor=random,seed=" + std::to_string(seed), 0, 8));
  EXPECT_GT(all.size(), 1U);
}

}  // namespace
}  // namespace kvreplay::testing
