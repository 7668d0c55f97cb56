#include "analysis/mean_interval.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace kvreplay {
namespace {

constexpr double undefined = std::numeric_limits<double>::quiet_NaN();

/// A letter for each.
std::vector<std::string> prompts(const char* letters) {
  std::vector<std::string> names;
  for (; *letters != '\0'; ++letters) names.emplace_back(1, *letters);
  return names;
}

TEST(MeanInterval, ByHand) {
  // Mean 2, standard deviation 1, n 3. With 2 degrees of freedom the quantile of p is (2p - 1) sqrt(2 / (1 - (2p -
  // 1)^2)).
  const double quantile = 0.95 * std::sqrt(2 / (1 - 0.95 * 0.95));
  const MeanInterval three = mean_interval(std::vector{1.0, 3.0, undefined, 2.0}, prompts("abcd"));
  EXPECT_EQ(three.count, 3);
  EXPECT_DOUBLE_EQ(three.mean, 2);
  EXPECT_NEAR(three.half_width, quantile / std::sqrt(3.0), 1e-12);
}

TEST(MeanInterval, NeedsTwoValues) {
  const MeanInterval one = mean_interval(std::vector{0.5, std::numeric_limits<double>::infinity()}, prompts("ab"));
  EXPECT_EQ(one.count, 1);
  EXPECT_EQ(one.mean, 0.5);
  EXPECT_TRUE(std::isnan(one.half_width));
  const MeanInterval none = mean_interval(std::vector<double>{}, {});
  EXPECT_EQ(none.count, 0);
  EXPECT_TRUE(std::isnan(none.mean));
}

TEST(MeanInterval, TracesOfOnePromptAreOneSample) {
  EXPECT_TRUE(std::isnan(mean_interval(std::vector{0.1, 0.9}, prompts("aa")).half_width));
  const MeanInterval pairs = mean_interval(std::vector{1.0, 1.0, 3.0, 3.0}, prompts("aabb"));
  const MeanInterval single = mean_interval(std::vector{1.0, 3.0}, prompts("ab"));
  EXPECT_EQ(pairs.count, 4);
  EXPECT_DOUBLE_EQ(pairs.mean, single.mean);
  EXPECT_DOUBLE_EQ(pairs.half_width, single.half_width);
}

TEST(MeanInterval, PromptsOfUnequalSizesByHand) {
  // Values 1, 3 of one prompt and 5 of another: mean 3, deviations of the sums -2 and 2; t of one degree of freedom is
  // tan(0.475 pi).
  const double half = std::tan(0.475 * 3.14159265358979323846) * std::sqrt(2.0 * 8) / 3;
  EXPECT_NEAR(half_width(std::vector{4.0, 5.0, 0.0}, std::vector{2.0, 1.0, 0.0}), half, 1e-9);
  EXPECT_NEAR(mean_interval(std::vector{1.0, 3.0, 5.0}, prompts("aab")).half_width, half, 1e-9);
}

}  // namespace
}  // namespace kvreplay
