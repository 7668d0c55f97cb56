// What queries of policies with sparse reads read, worked by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention_reference.h"
#include "fake_backend.h"
#include "observables/product_codes.h"
#include "policies/text/configured.h"
#include "random.h"

namespace kvreplay::testing {
namespace {

using Positions = std::vector<std::int32_t>;
using Pair = std::pair<float, float>;

/// One KV head with keys of two components, the prompt's and those of two later tokens. All queries of the first query
/// head are (1, 0), and all of the second are (0, 1).
class SparseReadsOf : public ::testing::Test {
 protected:
  static constexpr int prompt = 8, later = 2;

  SparseReadsOf() {
    const std::vector<Pair> keys{{4, 0}, {0, 3}, {1, 1}, {2, 0}, {0, 4}, {2, 0}, {0, 1}, {1, 0}, {9, 9}, {9, 9}};
    for (int token = 0; token < prompt + later; ++token) {
      const auto [x, y] = keys[static_cast<std::size_t>(token)];
      k.set(0, token, 0, x);
      k.set(0, token, 1, y);
      for (int head = 0; head < 2; ++head)
        for (int c = 0; c < 2; ++c) q.set(head, token, c, head == c ? 1.0F : 0.0F);
    }
    tensors.q = q.view();
    tensors.k = tensors.v = k.view();
  }

  /// The reads of a layer behind the dense ones.
  LayerReads reads_of(const std::string& policy) {
    return ConfiguredPolicy::parse(policy).plans(1).back().plan.schedule->reads(view());
  }
  std::vector<Positions> read(const std::string& policy, int budget, int query) {
    const KeptSet set = reads_of(policy).at(query, {&budget, 1}).front();
    return {set.positions(0), set.positions(1)};
  }
  const LayerView& view() {
    views.emplace_back(std::make_unique<LayerView>(backend, tensors, LayerPlace{.prompt = prompt}, range(8, 10)));
    return *views.back();
  }

  RandomTensor q{2, prompt + later, 2, DType::float32, 1, 1}, k{1, prompt + later, 2, DType::float32, 1, 2};
  LayerTensors tensors;
  FakeBackend backend;
  std::vector<std::unique_ptr<LayerView>> views;
};

using Sets = std::vector<Positions>;

TEST_F(SparseReadsOf, OracleTopKAreTheLargestLogitsOfEachQueryHead) {
  EXPECT_EQ(read("oracle-top-k", 3, 9), (Sets{{0, 3, 5}, {1, 2, 4}})) << "of tokens 2 and 6 the earlier one";
  EXPECT_EQ(read("oracle-top-k", 2, 4), (Sets{{0, 3}, {1, 4}})) << "a query of the prompt sees five tokens";
  EXPECT_EQ(read("oracle-top-k", 6, 4), (Sets{{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}}));
  EXPECT_EQ(reads_of("oracle-top-k").bytes, 0);
}

TEST_F(SparseReadsOf, SeveralBudgetsAtOnceAreThoseOfEach) {
  int policies_with_reads = 0;
  for (const std::string& name : policies().names()) {
    if (policies().get(name).make()->card().family != Family::reading) continue;
    const LayerPlan last = ConfiguredPolicy::parse(name).plans(1).back();
    const LayerReads reads = last.plan.schedule->reads(view());
    if (!reads.at) continue;  // nothing was recorded
    ++policies_with_reads;
    const std::vector<int> budgets{5, 1, 7, 3};
    for (const int query : {4, 9}) {
      const std::vector<KeptSet> together = reads.at(query, budgets);
      ASSERT_EQ(together.size(), budgets.size());
      for (std::size_t i = 0; i < budgets.size(); ++i)
        EXPECT_EQ(together[i], reads.at(query, {&budgets[i], 1}).front()) << name << ", budget " << budgets[i];
    }
  }
  EXPECT_GE(policies_with_reads, 5);
}

TEST_F(SparseReadsOf, BudgetsLeftForOneTokenRankTheSameTokensBesideOthers) {
  const LayerReads reads = reads_of("oracle-top-k:sinks=2,local=3");
  const std::vector<int> budgets{2, 6, 4};  // which select none, three and one
  const std::vector<KeptSet> together = reads.at(9, budgets);
  EXPECT_EQ(together[0].positions(0), (Positions{0, 1}));
  EXPECT_EQ(together[1].positions(0), (Positions{0, 1, 2, 3, 5, 7}));
  EXPECT_EQ(together[2].positions(0), (Positions{0, 1, 3, 7}));
}

TEST_F(SparseReadsOf, SinksAndLocalTokensCountInTheBudget) {
  EXPECT_EQ(read("oracle-top-k:sinks=1,local=3", 4, 9), (Sets{{0, 3, 5, 7}, {0, 1, 4, 7}})) << "7 of 7, 8 and 9";
  EXPECT_EQ(read("oracle-top-k:sinks=2,local=8", 3, 9), (Sets{{0, 1, 7}, {0, 1, 7}}));
  EXPECT_EQ(read("oracle-top-k:sinks=8", 3, 9), (Sets{{0, 1, 2}, {0, 1, 2}}));
  EXPECT_EQ(read("oracle-top-k:local=2", 3, 4), (Sets{{0, 3, 4}, {1, 3, 4}})) << "4 is the query's own";
}

TEST_F(SparseReadsOf, LayersWithAWindowRankTheTokensThatTheySee) {
  tensors.sliding_window = 7;  // query 9 sees 3 ... 9
  EXPECT_EQ(read("oracle-top-k", 2, 9), (Sets{{3, 5}, {4, 6}}));
  EXPECT_EQ(read("oracle-top-k:sinks=2", 2, 9), (Sets{{3, 5}, {4, 6}})) << "no sink is visible";
}

TEST_F(SparseReadsOf, OracleTopPExceedsAShareOfTheWeights) {
  // Weights of the first head: 1, two of e^-2, two of e^-3, three of e^-4; their cumulative shares are 0.702, 0.797,
  // 0.892, 0.926, 0.961, ...
  const auto first = [&](const std::string& p) { return read("oracle-top-p:p=" + p, 1, 9).front(); };
  EXPECT_EQ(first("0.7"), (Positions{0}));
  EXPECT_EQ(first("0.75"), (Positions{0, 3, 5})) << "both of equal weight";
  EXPECT_EQ(first("0.9"), (Positions{0, 2, 3, 5, 7}));
  EXPECT_EQ(first("0"), (Positions{0}));
  EXPECT_EQ(first("1"), range(0, 8));
  EXPECT_EQ(read("oracle-top-p:p=0.5,sinks=1", 1, 9).front(), (Positions{0, 3, 5})) << "shares without the sink";
  tensors.logit_softcap = 2;  // weights: 1, two of 0.667, two of 0.367, three of 0.145
  EXPECT_EQ(first("0.5"), (Positions{0, 3, 5}));
}

TEST_F(SparseReadsOf, PageMeansAreThePagesWithTheLargestProductOfTheMeanKey) {
  // Means: (2, 1.5), (1.5, 0.5), (1, 2), (0.5, 0.5).
  const std::string policy = "page-means:page=2,least_pages=1";
  EXPECT_EQ(read(policy, 4, 9), (Sets{{0, 1, 2, 3}, {0, 1, 4, 5}}));
  EXPECT_EQ(read(policy, 4, 6), (Sets{{0, 1, 6, 7}, {4, 5, 6, 7}})) << "the page of query 6 itself";
  EXPECT_EQ(read(policy, 1, 9), (Sets{{0, 1}, {4, 5}})) << "at least one page";
  EXPECT_EQ(reads_of(policy).bytes, 4 * 2 * 4.0) << "four pages of two float32";
  EXPECT_EQ(read("page-means:page=3,least_pages=1", 3, 9), (Sets{{0, 1, 2}, {0, 1, 2}}))
      << "means (1.67, 1.33), (1.33, 1.33) and (0.5, 0.5): of equal products the earlier page";
}

TEST_F(SparseReadsOf, DoubleSparsityRanksByTheLargestChannels) {
  // The first head has |q_0 k_0| alone and the second |q_1 k_1|; a label of one number is exact.
  EXPECT_EQ(read("double-sparsity:group_factor=2", 3, 9), (Sets{{0, 3, 5}, {1, 2, 4}}));
  EXPECT_EQ(read("double-sparsity:group_factor=2,share=kv-head", 3, 9), (Sets{{0, 3, 5}, {0, 1, 2}}))
      << "channel 0, with a mean of 10/16 against 9/16, in which the second head's queries are 0";
  EXPECT_EQ(reads_of("double-sparsity:group_factor=2,label_bits=8").bytes, 2 * 8 * (1 + 4.0));
  EXPECT_EQ(reads_of("double-sparsity:group_factor=2,label_bits=8,share=kv-head").bytes, 8 * (1 + 4.0));
}

TEST_F(SparseReadsOf, ProductQuantisedKeysAreExactWithACentreForEach) {
  EXPECT_EQ(read("pq:bits=3,init_offset=0,sinks=0,local=0", 3, 9), (Sets{{0, 3, 5}, {1, 2, 4}}));
  EXPECT_EQ(read("pq:bits=3,init_offset=2,sinks=1,local=0", 3, 9), (Sets{{0, 3, 5}, {0, 2, 4}})) << "1 has no code";
  EXPECT_EQ(read("pq:bits=3,init_offset=6,sinks=1,local=0", 7, 9), (Sets{{0, 6, 7}, {0, 6, 7}})) << "only 6 and 7 have";
  EXPECT_EQ(read("pq", 3, 9), (Sets{{0, 1, 2}, {0, 1, 2}})) << "128 sinks fill the budget";
  EXPECT_EQ(reads_of("pq:bits=3,init_offset=0").bytes, 2 * (8 * 3 / 8.0 + 8 * 1 * 4)) << "two parts: codes and centres";
  EXPECT_EQ(reads_of("pq:bits=3,init_offset=2").bytes, 2 * (6 * 3 / 8.0 + 6 * 1 * 4));
  EXPECT_THROW(reads_of("pq:parts=3"), Error);
}

TEST_F(SparseReadsOf, MagicPigReadsTokensWithTheCodeOfTheQueryInEnoughTables) {
  // The mean key is (10/8, 9/8), and the longest of the differences is (-1.25, 2.875) of token 4.
  const std::array<std::array<double, 2>, prompt> centred{{{2.75, -1.125},
                                                           {-1.25, 1.875},
                                                           {-0.25, -0.125},
                                                           {0.75, -1.125},
                                                           {-1.25, 2.875},
                                                           {0.75, -1.125},
                                                           {-1.25, -0.125},
                                                           {-0.25, -1.125}}};
  const double longest_square = 1.25 * 1.25 + 2.875 * 2.875;
  const std::array<std::array<double, 2>, 2> queries{{{-0.25, -1.125}, {-1.25, -0.125}}};
  const auto sign = [](int projection, double x, double y, double z) {
    const auto normal = [&](int c) { return gaussian(chain(5, 0, projection, c, 0), chain(5, 0, projection, c, 1)); };
    return normal(0) * x + normal(1) * y + normal(2) * z > 0;
  };
  for (const int collisions : {1, 2}) {
    Sets expected(2);
    for (int head = 0; head < 2; ++head)
      for (int token = 1; token < prompt; ++token) {
        const auto [x, y] = centred[static_cast<std::size_t>(token)];
        const auto [q_x, q_y] = queries[static_cast<std::size_t>(head)];
        const double z = std::sqrt(longest_square - x * x - y * y);
        int equal = 0;
        for (int table = 0; table < 4; ++table)
          equal += sign(2 * table, x, y, z) == sign(2 * table, q_x, q_y, 0) &&
                   sign(2 * table + 1, x, y, z) == sign(2 * table + 1, q_x, q_y, 0);
        if (equal >= collisions) expected[static_cast<std::size_t>(head)].push_back(token);
      }
    for (Positions& of_head : expected) of_head.insert(of_head.begin(), 0);
    const std::string policy = "magic-pig:tables=4,bits=2,seed=5,sinks=1,local=0,collisions=";
    EXPECT_EQ(read(policy + std::to_string(collisions), 1, 9), expected);
    EXPECT_EQ(reads_of(policy + std::to_string(collisions)).bytes, 8 * 4 * 2 / 8.0);
    EXPECT_LT(expected[0].size() + expected[1].size(), 2U * prompt);
  }
  EXPECT_THROW(reads_of("magic-pig:tables=4,collisions=5"), Error);
}

TEST_F(SparseReadsOf, MagicPigWeighsSampledTokensByTheInverseOfTheirProbability) {
  // Query 9 of the second head minus the mean key is (-1.25, -0.125), and the difference of token 1 is (-1.25, 1.875):
  // a product of 1.328 of lengths 1.256 and 3.135, and an angle of 1.2268.
  const auto weights = [&](const std::string& parameters, int query) {
    std::vector<double> logits(prompt + later);
    reads_of("magic-pig:tables=2,bits=3,sinks=1," + parameters).weights(1, query, 0, logits);
    for (double& w : logits) w = std::exp(w);
    return logits;
  };
  const double p = std::pow(1 - 1.2268 / 3.14159265, 3);
  EXPECT_NEAR(weights("local=0", 9)[1], 1 / (p * p + 2 * p * (1 - p)), 1e-3);
  EXPECT_NEAR(weights("local=0,collisions=2", 9)[1], 1 / (p * p), 1e-2);
  for (const int token : {0, 8, 9}) EXPECT_EQ(weights("local=0", 9)[static_cast<std::size_t>(token)], 1) << token;
  for (const int token : {0, 6, 7}) EXPECT_EQ(weights("local=4", 9)[static_cast<std::size_t>(token)], 1) << token;
  EXPECT_GT(weights("local=4", 9)[5], 1);
  EXPECT_GT(weights("local=0", 4)[3], 1);
  EXPECT_EQ(weights("local=0", 4)[4], 1) << "the query's own token";
  std::vector<double> unread(prompt, -HUGE_VAL);
  reads_of("magic-pig:sinks=0").weights(0, 9, 0, unread);
  for (const double logit : unread) EXPECT_EQ(logit, -HUGE_VAL);
  EXPECT_FALSE(reads_of("oracle-top-p").weights);
}

TEST_F(SparseReadsOf, DenseLayersReadEverything) {
  const std::vector<LayerPlan> plans = ConfiguredPolicy::parse("oracle-top-k:dense_layers=2").plans(3);
  ASSERT_EQ(plans.size(), 2U);
  EXPECT_EQ(plans[0].count, 2);
  EXPECT_EQ(plans[0].plan.schedule->name(), "schedule=once");
  EXPECT_EQ(plans[1].plan.schedule->decided(), Decision::never);
}

/// One head of four components: queries (1, 2, 0, 3), and three keys.
class DoubleSparsityOfOneHead : public ::testing::Test {
 protected:
  DoubleSparsityOfOneHead() {
    const float query[] = {1, 2, 0, 3}, keys[4][4] = {{3, 1, 0, 0}, {0, 0, 0, 1}, {0, 2, 3, 0}, {9, 9, 9, 9}};
    for (int token = 0; token < 4; ++token)
      for (int c = 0; c < 4; ++c) {
        q.set(0, token, c, query[c]);
        k.set(0, token, c, keys[token][c]);
      }
    tensors.q = q.view();
    tensors.k = tensors.v = k.view();
    tensors.rope.inv_freq = no_turn;
  }

  Positions read(const std::string& values, int budget) {
    const LayerView view(backend, tensors, {.prompt = 3}, {});
    return ConfiguredPolicy::parse("double-sparsity:" + values)
        .plans(1)
        .back()
        .plan.schedule->reads(view)
        .at(3, {&budget, 1})
        .front()
        .positions(0);
  }

  RandomTensor q{1, 4, 4, DType::float32, 1, 1}, k{1, 4, 4, DType::float32, 1, 2};
  std::vector<double> no_turn{0.0, 0.0};
  LayerTensors tensors;
  FakeBackend backend;
};

TEST_F(DoubleSparsityOfOneHead, LabelsAreRoundedBetweenTheirExtremes) {
  // With one bit the query is (0, 3, 0, 3), and the keys are (3, 0, 0, 0), (0, 0, 0, 1) and (0, 3, 3, 0).
  EXPECT_EQ(read("group_factor=1,label_bits=1", 1), Positions{2});
  EXPECT_EQ(read("group_factor=1,label_bits=1", 2), (Positions{1, 2}));
  EXPECT_EQ(read("group_factor=1,label_bits=16", 1), Positions{0}) << "products 5, 3 and 4";
}

TEST_F(DoubleSparsityOfOneHead, ChannelsAreRankedByQueriesKeysOrBoth) {
  // Sums over the prompt of |q_c k_c|: 3, 6, 0, 3; of |q_c|: 3, 6, 0, 9; of |k_c|: 3, 3, 3, 1.
  EXPECT_EQ(read("group_factor=2,label_bits=16", 2), (Positions{0, 2})) << "channels 0 and 1: 5, 0, 4";
  EXPECT_EQ(read("group_factor=2,label_bits=16,channels=q", 1), Positions{2}) << "channels 1 and 3: 2, 3, 4";
  EXPECT_EQ(read("group_factor=2,label_bits=16,channels=q", 2), (Positions{1, 2}));
  EXPECT_EQ(read("group_factor=2,label_bits=16,channels=k", 1), Positions{0}) << "channels 0 and 1";
}

TEST(DoubleSparsity, ReadsTheStatisticsThatItsChannelsNeed) {
  const auto needs = [](const std::string& channels) {
    return needs_of(ConfiguredPolicy::parse("double-sparsity:channels=" + channels).plans(1).back().plan);
  };
  EXPECT_TRUE(needs("qk").all_queries && !needs("qk").rope);
  EXPECT_TRUE(needs("q").all_queries && needs("q").rope);
  EXPECT_TRUE(!needs("k").all_queries && needs("k").rope);
}

/// Vectors of one component each, of one head.
Vectors line(std::vector<double> numbers) {
  return {1, static_cast<int>(numbers.size()), 1,
          [numbers](int, int i, std::span<double> vector) { vector[0] = numbers[static_cast<std::size_t>(i)]; }};
}

TEST(ProductCodes, AreThoseOfTheNearestMeans) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {  // all pairs of first centres
    const Matrix made = product_codes(line({0, 1, 10, 11}), {.parts = 1, .bits = 1, .seed = seed}, 2);
    ASSERT_EQ(made.columns(), 2 + 4);
    const int low = made(0, 0) < made(0, 1) ? 0 : 1;
    EXPECT_EQ(made(0, low), 0.5);
    EXPECT_EQ(made(0, 1 - low), 10.5);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(made(0, 2 + i), i < 2 ? low : 1 - low);
  }
}

TEST(ProductCodes, BeginWithTheSmallestHashesAndKeepTheAssignmentBeforeTheLastMeans) {
  const std::vector<double> numbers{0, 1, 10, 14};
  const std::uint64_t seed = 3, layer = 5;
  std::vector<std::pair<std::uint64_t, double>> order;
  for (std::size_t i = 0; i < 4; ++i) order.emplace_back(chain(seed, layer, 0, 0, i), numbers[i]);
  std::ranges::sort(order);
  const double centres[] = {order[0].second, order[1].second};
  const Matrix made =
      product_codes(line(numbers), {.parts = 1, .bits = 1, .iterations = 1, .seed = seed, .layer = 5}, 1);
  double sums[2] = {}, members[2] = {};
  for (int i = 0; i < 4; ++i) {
    const double x = numbers[static_cast<std::size_t>(i)];
    const int nearest = std::abs(x - centres[1]) < std::abs(x - centres[0]) ? 1 : 0;
    EXPECT_EQ(made(0, 2 + i), nearest);
    sums[nearest] += x;
    ++members[nearest];
  }
  for (int centre : {0, 1}) EXPECT_EQ(made(0, centre), sums[centre] / members[centre]);
}

TEST(ProductCodes, ACentreWithoutVectorsBecomesARandomOne) {
  const std::vector<double> numbers{5, 5, 5, 9};
  int found = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<std::pair<std::uint64_t, double>> order;
    for (std::size_t i = 0; i < 4; ++i) order.emplace_back(chain(seed, 0, 0, 0, i), numbers[i]);
    std::ranges::sort(order);
    if (order[0].second != 5 || order[1].second != 5) continue;  // both centres are 5: the second has no vectors
    ++found;
    const Matrix made = product_codes(line(numbers), {.parts = 1, .bits = 1, .iterations = 1, .seed = seed}, 1);
    EXPECT_EQ(made(0, 0), 6);
    EXPECT_EQ(made(0, 1), numbers[chain(seed, 0, 0, 0, 1, 0) % 4]);
  }
  EXPECT_GT(found, 3);
}

}  // namespace
}  // namespace kvreplay::testing
