#include "policies/arithmetic/top_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "random.h"

namespace kvreplay {
namespace {

TEST(TopShare, ByHand) {
  std::vector<double> logits;
  for (const double weight : {0.1, 0.4, 0.2, 0.1, 0.2}) logits.push_back(std::log(weight));
  const auto read = [&](double share) { return top_share(logits, share); };
  using Tokens = std::vector<std::int32_t>;
  EXPECT_EQ(read(0.0), Tokens({1}));
  EXPECT_EQ(read(0.39), Tokens({1}));
  EXPECT_EQ(read(0.5), Tokens({1, 2, 4})) << "equal weights together";
  EXPECT_EQ(read(0.85), Tokens({0, 1, 2, 3, 4}));
  EXPECT_EQ(read(1.0), Tokens({0, 1, 2, 3, 4}));
  EXPECT_TRUE(top_share({}, 0.5).empty());
}

TEST(TopShare, OfManyWeightsIsTheShortestListThatExceedsTheShare) {
  std::vector<double> weights(1000), logits;
  double total = 0;
  for (std::uint64_t i = 0; i < weights.size(); ++i) total += weights[i] = uniform(chain(7, i));
  for (double& weight : weights) logits.push_back(std::log(weight /= total));
  for (const double share : {0.01, 0.5, 0.9, 0.999}) {
    double sum = 0, least = 1;
    for (const std::int32_t token : top_share(logits, share)) {
      sum += weights[static_cast<std::size_t>(token)];
      least = std::min(least, weights[static_cast<std::size_t>(token)]);
    }
    EXPECT_GT(sum, share);
    EXPECT_LE(sum - least, share);
    for (const double weight : weights)
      if (weight > least) sum -= weight;
    EXPECT_NEAR(sum, least, 1e-12) << "all larger weights are read";
  }
  EXPECT_EQ(top_share(logits, 1.0).size(), logits.size());
}

TEST(TopShare, AShareOfOneReadsAllTokensHoweverTheSumsAreRounded) {
  for (std::uint64_t trial = 0; trial < 100; ++trial) {
    std::vector<double> logits(100);  // the sum of the largest weights can exceed 1
    for (std::uint64_t i = 0; i < logits.size(); ++i) logits[i] = 10 * gaussian(chain(trial, i, 0), chain(trial, i, 1));
    EXPECT_EQ(top_share(logits, 1.0).size(), logits.size()) << "trial " << trial;
  }
}

}  // namespace
}  // namespace kvreplay
