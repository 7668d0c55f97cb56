// How budgets are divided: examples worked by hand, and what holds for any input.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>

#include "error.h"
#include "policies/allocators/ada.h"
#include "policies/allocators/decay.h"
#include "policies/allocators/dynamic_allocation.h"
#include "policies/allocators/entropy_allocation.h"
#include "policies/allocators/layer_shares.h"
#include "policies/allocators/pyramid.h"
#include "policies/arithmetic/apportion.h"
#include "policies/plan_part.h"
#include "policies/text/configured.h"
#include "random.h"

namespace kvreplay {
namespace {

using Counts = std::vector<int>;
using Weights = std::vector<std::int64_t>;
using RealWeights = std::vector<double>;

int sum(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), 0); }

/// 0 ... n-1, from the coordinates of a random test.
template <class... Coordinates>
int below(int n, Coordinates... at) {
  return static_cast<int>(chain(static_cast<std::uint64_t>(at)...) % static_cast<std::uint64_t>(n));
}

// ---- apportion

TEST(Apportion, ClampsToBoundsAndHandsTheRestToTheOthers) {
  EXPECT_EQ(apportion(16, Weights{117, 79, 41, 3}, 0, 10), (Counts{8, 5, 3, 0}));
  EXPECT_EQ(apportion(16, Weights{20, 6, 4, 2}, 0, 8), (Counts{8, 4, 3, 1}));
  EXPECT_EQ(apportion(10, Weights{1, 1, 1}, 0, 10), (Counts{4, 3, 3}));
  EXPECT_EQ(apportion(7, Weights{0, 0, 5}, 1, 7), (Counts{1, 1, 5}));
}

TEST(Apportion, EqualSharesWithoutWeightsAndNoMoreThanFits) {
  EXPECT_EQ(apportion(7, Weights{0, 0, 0}, 0, 7), (Counts{3, 2, 2}));
  EXPECT_EQ(apportion(9, Weights{5, 0, 0}, 0, Counts{2, 9, 9}), (Counts{2, 4, 3}));
  EXPECT_EQ(apportion(100, Weights{1, 2}, 0, Counts{3, 4}), (Counts{3, 4}));
  EXPECT_EQ(apportion(0, Weights{1, 2}, 0, 5), (Counts{0, 0}));
  EXPECT_EQ(apportion(3, Weights{}, 0, 5), Counts{});
  EXPECT_EQ(apportion(6, Weights{9, 1, 1}, Counts{0, 0, 3}, Counts{6, 6, 3}), (Counts{3, 0, 3}));
}

TEST(Apportion, FractionsBeyondDoublePrecisionDecide) {
  const std::int64_t large = std::int64_t{1} << 60;
  EXPECT_EQ(apportion(3, Weights{large, large + 1}, 0, 3), (Counts{1, 2}));
  EXPECT_EQ(apportion(3, Weights{large, large}, 0, 3), (Counts{2, 1}));
}

TEST(Apportion, RealWeights) {
  EXPECT_EQ(apportion(10, RealWeights{0.1, 0.1, 0.1}, 0, 10), (Counts{4, 3, 3}));
  EXPECT_EQ(apportion(16, RealWeights{0.625, 0.1875, 0.125, 0.0625}, 0, 8), (Counts{8, 4, 3, 1}));
  EXPECT_EQ(apportion(4, RealWeights{0.0, 0.0}, 0, 4), (Counts{2, 2}));
}

TEST(Apportion, RefusesLowerBoundsAboveTheTotal) { EXPECT_THROW(apportion(3, Weights{1, 1}, 2, 9), Error); }

/// clamp(level w_i, lo_i, hi_i) with the one level at which they sum to `total`: what the counts round.
RealWeights filled(double total, const Weights& weights, const Counts& lo, const Counts& hi) {
  const auto at = [&](double level) {
    RealWeights shares;
    for (std::size_t i = 0; i < weights.size(); ++i)
      shares.push_back(std::clamp(level * static_cast<double>(weights[i]), double(lo[i]), double(hi[i])));
    return shares;
  };
  double under = 0, over = total + 1;
  for (int step = 0; step < 200; ++step) {
    const double middle = (under + over) / 2;
    const RealWeights shares = at(middle);
    (std::accumulate(shares.begin(), shares.end(), 0.0) < total ? under : over) = middle;
  }
  return at(over);
}

TEST(Apportion, SumsToTheTotalWithinBoundsAndRoundsProportionalShares) {
  for (int round = 0; round < 3000; ++round) {
    const int items = 1 + below(9, round, 0);
    Weights weights;
    Counts lo, hi;
    for (int i = 0; i < items; ++i) {
      weights.push_back(1 + below(round % 2 == 0 ? 5 : 100000, round, 1, i));
      lo.push_back(below(4, round, 2, i));
      hi.push_back(lo.back() + below(12, round, 3, i));
    }
    const int total = sum(lo) + below(60, round, 4);
    const int divided = std::min(total, sum(hi));
    const RealWeights real(weights.begin(), weights.end());
    const RealWeights shares = filled(divided, weights, lo, hi);
    for (const Counts& counts : {apportion(total, weights, lo, hi), apportion(total, real, lo, hi)}) {
      ASSERT_EQ(sum(counts), divided) << round;
      for (std::size_t i = 0; i < counts.size(); ++i) {
        ASSERT_TRUE(lo[i] <= counts[i] && counts[i] <= hi[i]) << round;
        ASSERT_LT(std::abs(counts[i] - shares[i]), 1 + 1e-6) << round;
      }
    }
  }
}

TEST(Apportion, MoreWeightNeverGetsLess) {
  for (int round = 0; round < 1000; ++round) {
    const int items = 2 + below(8, round, 0), hi = 1 + below(20, round, 1);
    Weights weights;
    for (int i = 0; i < items; ++i) weights.push_back(below(20, round, 2, i));
    std::ranges::sort(weights, std::greater{});
    const Counts counts = apportion(below(hi * items + 1, round, 3), weights, 0, hi);
    ASSERT_TRUE(std::ranges::is_sorted(counts, std::greater{})) << round;
  }
}

// ---- heads of a layer

/// c_h of the definition: every entry of the layer in one list.
Counts best_of_layer(const Matrix& scores, int columns, int best) {
  std::vector<std::tuple<double, int, int>> entries;
  for (int h = 0; h < scores.rows(); ++h)
    for (int j = 0; j < columns; ++j) entries.emplace_back(-scores(h, j), h, j);
  std::ranges::sort(entries);
  Counts counts(static_cast<std::size_t>(scores.rows()));
  for (int i = 0; i < best; ++i) ++counts[static_cast<std::size_t>(std::get<1>(entries[static_cast<std::size_t>(i)]))];
  return counts;
}

TEST(AdaptiveHeads, DivideTheSlotsByBestEntriesAndAFloor) {
  for (int round = 0; round < 200; ++round) {
    const int heads = 1 + below(5, round, 0), recent = below(4, round, 1), columns = 8 + below(20, round, 2);
    const int slots = 1 + below(columns, round, 3);
    Matrix scores(heads, columns + recent);
    for (int h = 0; h < heads; ++h)
      for (int j = 0; j < columns + recent; ++j) scores(h, j) = (h + 1) * uniform(chain(9, round, h, j));
    const Division division{.layers = 2, .prompt = columns + recent, .budget = slots + recent, .recent = recent};
    for (const int thousandths : {0, 200, 333, 1000})
      for (const bool normalise : {false, true}) {
        Matrix ranked = scores;
        for (int h = 0; normalise && h < heads; ++h) {
          RealWeights sorted(scores.row(h).begin(), scores.row(h).begin() + columns);
          std::ranges::sort(sorted, std::greater{});
          const double best = std::accumulate(sorted.begin(), sorted.begin() + slots, 0.0);
          for (double& score : ranked.row(h)) score *= best / std::accumulate(sorted.begin(), sorted.end(), 0.0);
        }
        Weights weights;
        for (const int count : best_of_layer(ranked, columns, slots * heads))
          weights.push_back((1000 - thousandths) * count + thousandths * slots);
        Counts expected = apportion(slots * heads, weights, 0, columns);
        for (int& count : expected) count += recent;
        const Counts found = AdaptiveHeads{thousandths / 1000.0, normalise}.allocator()(division, scores);
        ASSERT_EQ(found, expected) << round << ", " << thousandths << ", " << normalise;
        ASSERT_EQ(sum(found), heads * (slots + recent));
      }
  }
}

TEST(AdaptiveHeads, AnExampleByHand) {
  // Of the 4 best entries 3 are the first head's: (0.8 * 3 + 0.2 * 2) : (0.8 * 1 + 0.2 * 2) = 2.8 : 1.2.
  Matrix scores(2, 4);
  const double rows[2][4] = {{9, 8, 7, 1}, {6, 2, 2, 2}};
  for (int h = 0; h < 2; ++h)
    for (int j = 0; j < 4; ++j) scores(h, j) = rows[h][j];
  const Division division{.prompt = 4, .budget = 2};
  EXPECT_EQ(AdaptiveHeads{}.allocator()(division, scores), (Counts{3, 1}));
  EXPECT_EQ((AdaptiveHeads{.alpha = 1}.allocator()(division, scores)), (Counts{2, 2}));
}

// ---- sizes that shrink with depth

TEST(Pyramid, FallsByEqualStepsFromTwiceTheMeanToItsTwentieth) {
  const Counts counts = Pyramid{}.allocator()({.layers = 32, .prompt = 3008, .budget = 128, .recent = 8});
  ASSERT_EQ(counts.size(), 32U);
  EXPECT_EQ((Counts{counts.begin(), counts.begin() + 3}), (Counts{242, 235, 227}));
  EXPECT_EQ((Counts{counts.end() - 3, counts.end()}), (Counts{29, 21, 14}));
  EXPECT_EQ(sum(counts), 32 * 128);
}

TEST(Pyramid, BeginsWithAllCandidatesWhereTheFirstLayerWouldExceedThem) {
  EXPECT_EQ(Pyramid{}.allocator()({.layers = 4, .prompt = 12, .budget = 6, .recent = 2}), (Counts{10, 7, 5, 2}));
  EXPECT_EQ(Pyramid{}.allocator()({.layers = 4, .prompt = 12, .budget = 8, .recent = 2}), (Counts{12, 9, 7, 4}));
  EXPECT_EQ(Pyramid{}.allocator()({.layers = 4, .prompt = 12, .budget = 8, .sinks = 1, .recent = 1}),
            (Counts{12, 9, 7, 4}));
}

TEST(Pyramid, OneLayerBetaOneAndShortPromptsAreUniform) {
  EXPECT_EQ(Pyramid{}.allocator()({.layers = 1, .prompt = 12, .budget = 8, .recent = 2}), Counts{8});
  EXPECT_EQ(Pyramid{.beta = 1}.allocator()({.layers = 3, .prompt = 99, .budget = 8, .recent = 2}), (Counts{8, 8, 8}));
  const Pyramid code{.short_uniform = true};
  EXPECT_EQ(code.allocator()({.layers = 2, .prompt = 11, .budget = 8, .recent = 2}), (Counts{8, 8}));
  EXPECT_EQ(code.allocator()({.layers = 2, .prompt = 12, .budget = 8, .recent = 2}), (Counts{12, 4}));
  EXPECT_EQ(Pyramid{}.allocator()({.layers = 2, .prompt = 12, .budget = 3, .recent = 3}), (Counts{3, 3}));
}

TEST(Decay, DividesTheBudgetInProportionToTheSizes) {
  const Division fixture{.layers = 4, .prompt = 12, .budget = 6, .sinks = 1, .recent = 2};
  EXPECT_EQ((Decay{.r = 0.3}.scaled()(fixture)), (Counts{7, 6, 6, 5}));
  // 1, 1/2, 1/4 of 21.
  EXPECT_EQ((Decay{0.5, DecayCurve::constant}.scaled()({.layers = 3, .prompt = 99, .budget = 7})), (Counts{12, 6, 3}));
  // 1/2, 5/8, 3/4 remain from layer to layer: 128 : 64 : 40 : 30.
  EXPECT_EQ((Decay{0.5, DecayCurve::linear}.scaled()({.layers = 4, .prompt = 999, .budget = 131})),
            (Counts{256, 128, 80, 60}));
  EXPECT_EQ((Decay{0.5, DecayCurve::constant}.scaled()({.layers = 3, .prompt = 9, .budget = 7})), (Counts{9, 8, 4}));
}

TEST(Decay, CosineFallsFromOneToR) {
  const Decay decay{.r = 0.2};
  EXPECT_DOUBLE_EQ(decay.factor(0, 6), 1.0);
  EXPECT_DOUBLE_EQ(decay.factor(3, 6), 0.6);
  EXPECT_DOUBLE_EQ(decay.factor(2, 6), 0.2 + 0.8 * 0.75);
  EXPECT_LT(decay.factor(5, 6), decay.factor(4, 6));
}

TEST(Decay, NaturalLengthsShrinkTheContextAfterEachLayerWhateverTheBudget) {
  const Decay decay{0.9, DecayCurve::constant};
  for (const int budget : {5, 500}) {
    const Division division{.layers = 4, .prompt = 1000, .budget = budget, .sinks = 4, .recent = 201};
    EXPECT_EQ(decay.natural()(division), (Counts{1000, 205 + 715, 205 + 643, 205 + 578}));
  }
}

TEST(Decay, NaturalLengthsLeaveAContextThatWouldFallTo64) {
  const Decay half{0.5, DecayCurve::constant};
  EXPECT_EQ(half.natural()({.layers = 2, .prompt = 129, .recent = 1}), (Counts{129, 129}));
  EXPECT_EQ(half.natural()({.layers = 3, .prompt = 131, .recent = 1}), (Counts{131, 66, 66}));
  EXPECT_EQ(half.natural()({.layers = 2, .prompt = 500, .sinks = 3, .recent = 497}), (Counts{500, 500}));
}

TEST(ShrinkingSizes, SpendTheBudgetExactlyAndNeverGrow) {
  for (int round = 0; round < 1000; ++round) {
    Division division{.layers = 1 + below(40, round, 0), .prompt = 2 + below(300, round, 1)};
    division.budget = 1 + below(division.prompt - 1, round, 2);
    division.sinks = below(std::min(5, division.budget + 1), round, 3);
    division.recent = below(division.budget - division.sinks + 1, round, 4);
    const double r = 0.05 + 0.95 * uniform(chain(static_cast<std::uint64_t>(round), 5));
    const auto curve = std::array{DecayCurve::cosine, DecayCurve::linear, DecayCurve::constant}[std::size_t(round % 3)];
    const Pyramid pyramid{.beta = 1 + below(30, round, 6)};
    for (const Counts& counts : {pyramid.allocator()(division), Decay{r, curve}.scaled()(division)}) {
      ASSERT_EQ(sum(counts), division.layers * division.budget) << round;
      ASSERT_TRUE(std::ranges::is_sorted(counts, std::greater{})) << round;
      ASSERT_LE(counts.front(), division.prompt) << round;
      ASSERT_GE(counts.back(), division.by_rule()) << round;
    }
  }
}

// ---- DynamicKV's allocator

using LayerCounts = std::vector<Counts>;

Matrix matrix(const std::vector<RealWeights>& rows) {
  Matrix m(static_cast<int>(rows.size()), static_cast<int>(rows.front().size()));
  for (int r = 0; r < m.rows(); ++r) std::ranges::copy(rows[static_cast<std::size_t>(r)], m.row(r).begin());
  return m;
}

/// One head, one sink and one recent token that do not compete, b = 2 of M = 4; of the best four the first layer has
/// three.
const std::vector<Matrix> two_layers{matrix({{0, 9, 8, 7, 6, 0}}), matrix({{99, 5, 4, 3, 10, 99}})};
const Division two_layers_division{.layers = 2, .prompt = 6, .budget = 4, .sinks = 1, .recent = 1};

std::vector<const Matrix*> pointers(const std::vector<Matrix>& layers) {
  std::vector<const Matrix*> all;
  for (const Matrix& layer : layers) all.push_back(&layer);
  return all;
}

LayerCounts of_two_layers(const DynamicAllocation& part) {
  return part.allocator()(two_layers_division, pointers(two_layers));
}

TEST(DynamicAllocation, SharesByTheNumberOfBestEntries) {
  EXPECT_EQ(of_two_layers({}), (LayerCounts{{5}, {3}}));
  EXPECT_EQ(of_two_layers({.update = 1}), (LayerCounts{{5}, {3}}));
  EXPECT_EQ(of_two_layers({.r_max = 1e9}), (LayerCounts{{5}, {3}}));
}

TEST(DynamicAllocation, NoLayerGrowsBeyondItsBuffer) {
  EXPECT_EQ(of_two_layers({.r_max = 1}), (LayerCounts{{4}, {4}}));
  // The first layer alone has two slots for itself, and never more again.
  EXPECT_EQ(of_two_layers({.update = 1, .mid_total = MidTotal::proportional}), (LayerCounts{{4}, {4}}));
  EXPECT_EQ(of_two_layers({.update = 1, .mid_total = MidTotal::proportional, .progressive = false}),
            (LayerCounts{{5}, {3}}));
}

TEST(DynamicAllocation, MinMaxStarvesTheSmallestUnlessAllAreEqual) {
  EXPECT_EQ(of_two_layers({.norm = CountNormalisation::minmax}), (LayerCounts{{6}, {2}}));
  const std::vector<Matrix> equal{matrix({{9, 8, 1}}), matrix({{9, 8, 1}})};
  EXPECT_EQ((DynamicAllocation{.norm = CountNormalisation::minmax}.allocator()({.layers = 2, .prompt = 3, .budget = 2},
                                                                               pointers(equal))),
            (LayerCounts{{2}, {2}}));
}

TEST(DynamicAllocation, TiesGoToTheLowerLayer) {
  const std::vector<Matrix> flat(2, Matrix(2, 4, 1.0));
  EXPECT_EQ(DynamicAllocation{}.allocator()({.layers = 2, .prompt = 4, .budget = 1}, pointers(flat)),
            (LayerCounts{{2, 2}, {0, 0}}));
}

TEST(DynamicAllocation, NothingCompetesWhereAllSlotsGoByRule) {
  EXPECT_EQ(DynamicAllocation{}.allocator()({.layers = 2, .prompt = 6, .budget = 2, .recent = 2}, pointers(two_layers)),
            (LayerCounts{{2}, {2}}));
}

TEST(DynamicAllocation, UpdatesAfterEveryTwoLayers) {
  // Entries of 1 among entries of 0; the window's columns come last. After two layers the best 32 are 18 + 14 of the
  // 33, and both buffers of 8 fit; after four all 64 count.
  std::vector<Matrix> layers;
  for (const int ones : {18, 15, 17, 14}) {
    Matrix& layer = layers.emplace_back(4, 12);
    for (int i = 0; i < ones; ++i) layer(i / 10, i % 10) = 1;
  }
  EXPECT_EQ((DynamicAllocation{.r_max = 2, .update = 2}.allocator()(
                {.layers = 4, .prompt = 12, .budget = 6, .recent = 2}, pointers(layers))),
            (LayerCounts{Counts(4, 7), Counts(4, 6), Counts(4, 6), Counts(4, 5)}));
}

/// The algorithm as written: all entries in order at every update.
LayerCounts by_sorting(const DynamicAllocation& part, const Division& division, std::span<const Matrix> scores) {
  const int rows = scores.front().rows(), layers = division.layers, slots = division.slots();
  const double buffer = std::min(std::floor(slots * part.r_max), double(division.candidates()));
  std::vector<std::tuple<double, int, int, int>> entries;
  Counts caps;
  for (int l = 0; l < layers; ++l) {
    for (int h = 0; h < rows; ++h)
      for (int j = division.sinks; j < division.prompt - division.recent; ++j)
        entries.emplace_back(-scores[std::size_t(l)](h, j), l, h, j);
    caps.push_back(static_cast<int>(buffer));
    if (l + 1 < layers && (!part.progressive || (l + 1) % part.update != 0)) continue;
    std::ranges::sort(entries);
    Weights counts(std::size_t(l) + 1);
    for (int i = 0; i < slots * rows * (l + 1); ++i) ++counts[std::size_t(std::get<1>(entries[std::size_t(i)]))];
    if (part.norm == CountNormalisation::minmax) {
      const std::int64_t least = std::ranges::min(counts);
      for (std::int64_t& count : counts) count -= least;
    }
    caps = apportion(slots * (part.mid_total == MidTotal::full ? layers : l + 1), counts, 0, Counts(caps));
  }
  LayerCounts all;
  for (const int cap : caps) all.emplace_back(std::size_t(rows), cap + division.by_rule());
  return all;
}

TEST(DynamicAllocation, EqualsTheSortedAlgorithmAndSpendsTheBudgetExactly) {
  for (int round = 0; round < 600; ++round) {
    Division division{.layers = 1 + below(9, round, 0), .prompt = 3 + below(40, round, 1)};
    division.budget = 1 + below(division.prompt - 1, round, 2);
    division.sinks = below(std::min(3, division.budget + 1), round, 3);
    division.recent = below(std::min(5, division.budget - division.sinks + 1), round, 4);
    const int rows = 1 + below(3, round, 5), values = round % 2 == 0 ? 6 : 1'000'000;
    std::vector<Matrix> scores;
    for (int l = 0; l < division.layers; ++l) {
      Matrix& layer = scores.emplace_back(rows, division.prompt);
      for (int i = 0; i < rows * division.prompt; ++i)
        layer.values()[std::size_t(i)] = below(values, round, 6, l, i) * (l + 1.0);
    }
    const DynamicAllocation part{
        .r_max = 1 + 3 * uniform(chain(std::uint64_t(round), 7)),
        .update = 1 + below(4, round, 8),
        .mid_total = below(2, round, 9) == 0 ? MidTotal::full : MidTotal::proportional,
        .norm = below(2, round, 10) == 0 ? CountNormalisation::sum : CountNormalisation::minmax,
        .progressive = below(3, round, 11) != 0};
    const LayerCounts counts = part.allocator()(division, pointers(scores));
    ASSERT_EQ(counts, by_sorting(part, division, scores)) << round;
    int slots = 0;
    for (const Counts& of_layer : counts) {
      slots += sum(of_layer);
      ASSERT_LE(std::ranges::max(of_layer), division.prompt) << round;
    }
    ASSERT_EQ(slots, division.layers * rows * division.budget) << round;
  }
}

// ---- by a list

TEST(LayerShares, DivideTheWholeBudgetWithinWhatStaysByRuleAndThePrompt) {
  const ByLayer counts = by_shares({4, 2, 1, 1});
  EXPECT_EQ(counts({.layers = 4, .prompt = 99, .budget = 16}), (Counts{32, 16, 8, 8}));
  EXPECT_EQ(counts({.layers = 4, .prompt = 20, .budget = 16}), (Counts{20, 20, 12, 12})) << "no more than P";
  EXPECT_EQ(counts({.layers = 4, .prompt = 99, .budget = 16, .sinks = 2, .recent = 8}), (Counts{29, 15, 10, 10}))
      << "no less than stays by rule";
  EXPECT_EQ(by_shares({0.5, 0.25, 0.25})({.layers = 3, .prompt = 99, .budget = 4}), (Counts{6, 3, 3}));
}

TEST(LayerShares, QuartersOfTheBudgetAreExact) {
  const Weights quarters{1, 2, 3, 4, 5, 6, 8, 3, 4};
  ASSERT_EQ(std::accumulate(quarters.begin(), quarters.end(), 0L), 4 * std::ssize(quarters));
  RealWeights shares;
  for (const std::int64_t one : quarters) shares.push_back(static_cast<double>(one) / 4);
  for (const int budget : {4, 52, 396, 100000}) {
    const Counts counts = by_shares(shares)({.layers = 9, .prompt = 1000000, .budget = budget});
    for (std::size_t l = 0; l < quarters.size(); ++l) EXPECT_EQ(counts[l], quarters[l] * budget / 4) << budget;
  }
}

TEST(LayerShares, AreOneForEachLayer) {
  EXPECT_THROW(by_shares({1, 2})({.layers = 3, .prompt = 9, .budget = 3}), Error);
  EXPECT_THROW(by_shares({1, 2, 3, 4})({.layers = 3, .prompt = 9, .budget = 3}), Error);
  EXPECT_EQ(ConfiguredPolicy::parse("snapkv:allocate=list((4,2,0.50))").label(),
            "snapkv:allocate=list,shares=(4,2,0.5)");
  EXPECT_EQ(ConfiguredPolicy::parse("snapkv:allocate=list,shares=(4,2,0.5)").params(),
            ConfiguredPolicy::parse("snapkv:allocate=list((4,2,0.50))").params());
  for (const char* wrong : {"(1,-1)", "(0,0)", "(1,x)", "(1,,2)", "(1,1e999)"})
    EXPECT_THROW(ConfiguredPolicy::parse(std::string("snapkv:allocate=list,shares=") + wrong), Error) << wrong;
}

// ---- infinite scores

/// Of the first head the infinite score alone is among the 4 best: (0.8 * 1 + 0.2 * 2) : (0.8 * 3 + 0.2 * 2).
TEST(AdaptiveHeads, InfiniteScoresStayFirstAndLastWhenNormalised) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Division division{.prompt = 4, .budget = 2};
  const WithinLayer ada = AdaptiveHeads{.normalise = true}.allocator();
  EXPECT_EQ(ada(division, matrix({{infinity, 1, 1, 1}, {6, 2, 2, 2}})), (Counts{1, 3}));
  EXPECT_EQ(ada(division, matrix({{infinity, infinity, infinity, 1}, {6, 2, 2, 2}})), (Counts{3, 1}));
  EXPECT_EQ(ada(division, matrix({{-infinity, -infinity, 1, 1}, {6, 2, 2, 2}})), (Counts{0, 4}));
}

// ---- layers by the entropy of their scores

const AcrossLayers paper = EntropyAllocation{.floor = 0}.allocator();

TEST(EntropyAllocation, SharesByHowEvenlyScoresAreSpread) {
  // e = 1 where all four are equal, ln 2 / ln 4 = 1/2 where two are, 0 where one token has it all.
  const Matrix even = matrix({{2, 2, 2, 2}}), halves = matrix({{0, 3, 0, 3}}), single = matrix({{0, 0, 7, 0}});
  const auto counts = [](int budget, const std::vector<Matrix>& layers) {
    const auto layer_count = static_cast<int>(layers.size());
    return paper({.layers = layer_count, .prompt = 4, .budget = budget}, pointers(layers));
  };
  EXPECT_EQ(counts(3, {even, halves}), (LayerCounts{{4}, {2}}));
  EXPECT_EQ(counts(1, {halves, even, single}), (LayerCounts{{1}, {2}, {0}}));
  EXPECT_EQ(counts(2, {single, single}), (LayerCounts{{2}, {2}}));
}

TEST(EntropyAllocation, InfiniteScoresHaveEqualSharesAndTheOthersNone) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Matrix even = matrix({{2, 2, 2, 2}}), halves = matrix({{infinity, 0, 1, infinity}}),
               single = matrix({{5, infinity, 5, 5}});
  EXPECT_EQ(paper({.layers = 3, .prompt = 4, .budget = 1}, pointers(std::vector{halves, even, single})),
            (LayerCounts{{1}, {2}, {0}}));
}

TEST(EntropyAllocation, HeadsShareByTheirLayersBestEntriesAndSinksAndRecentDoNotCompete) {
  // Both layers are as even as each other; of the first one's four slots the first head has three.
  const std::vector<Matrix> layers{matrix({{99, 9, 8, 7, 0}, {0, 6, 5, 4, 99}}),
                                   matrix({{0, 4, 5, 6, 0}, {0, 7, 8, 9, 0}})};
  EXPECT_EQ(paper({.layers = 2, .prompt = 5, .budget = 4, .sinks = 1, .recent = 1}, pointers(layers)),
            (LayerCounts{{5, 3}, {3, 5}}));
}

TEST(EntropyAllocation, TheFloorOfEveryHeadIsAShareOfTheMean) {
  const std::vector<Matrix> layers{matrix({{99, 9, 8, 7, 0}, {0, 6, 5, 4, 99}}),
                                   matrix({{0, 4, 5, 6, 0}, {0, 7, 8, 9, 0}})};
  const Division division{.layers = 2, .prompt = 5, .budget = 4, .sinks = 1, .recent = 1};
  const auto counts = [&](double floor) {
    return EntropyAllocation{.floor = floor}.allocator()(division, pointers(layers));
  };
  // Of two slots a head: half of 3, 1, 1, 3 and half of 2 are 2.5, 1.5, 1.5, 2.5; the first two are rounded up.
  EXPECT_EQ(counts(0.5), (LayerCounts{{5, 4}, {3, 4}}));
  EXPECT_EQ(counts(1), (LayerCounts{{4, 4}, {4, 4}}));
  // A layer without entropy has its floors alone.
  const std::vector<Matrix> unequal{matrix({{0, 3, 0, 3}}), matrix({{0, 0, 7, 0}})};
  EXPECT_EQ((EntropyAllocation{.floor = 0.5}.allocator()({.layers = 2, .prompt = 4, .budget = 2}, pointers(unequal))),
            (LayerCounts{{3}, {1}}));
}

// ---- by name

TEST(AllocationParts, FillAnyPlan) {
  const auto allocator = [](const char* text) {
    Plan plan;
    make_part(PartKind::allocate, text)->fill(plan);
    return plan.allocate;
  };
  const Division division{.layers = 3, .prompt = 99, .budget = 7};
  EXPECT_EQ(allocator("pyramid(1)")->counts(division), (LayerCounts{{7}, {7}, {7}}));
  EXPECT_EQ(allocator("decay(0.5,constant)")->counts(division), (LayerCounts{{12}, {6}, {3}}));
  EXPECT_EQ(allocator("dynamickv(1)")->counts_of_layers(two_layers_division, pointers(two_layers), 0),
            (LayerCounts{{4}, {4}}));
  for (const char* outside : {"pyramid(0)", "decay(0)", "decay(1.1)", "dynamickv(0.9)", "dynamickv(1,0)"})
    EXPECT_THROW(allocator(outside), Error) << outside;
}

}  // namespace
}  // namespace kvreplay
