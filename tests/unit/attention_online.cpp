#include <gtest/gtest.h>

#include "attention_reference.h"

namespace kvreplay::testing {
namespace {

std::vector<std::int32_t> evict(const RandomLayer& layer, const OnlineEviction& what, int threads = 2) {
  return tested_backend(threads)->online_eviction(layer.tensors(), what);
}

class OnlineEvictionOf : public ::testing::TestWithParam<LayerShape> {};

TEST_P(OnlineEvictionOf, IsThatOfBruteForce) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer}) {
    for (const auto& [budget, recent] : {std::pair{1, 1}, {7, 1}, {7, 7}, {20, 10}, {33, 5}, {1000, 3}}) {
      SCOPED_TRACE(::testing::Message() << "heads " << static_cast<int>(heads) << ", budget " << budget);
      const OnlineEviction what{.heads = heads, .tokens = shape.tokens, .budget = budget, .recent = recent};
      const std::vector<std::int32_t> expected = reference_eviction(layer, what);
      const std::vector<std::int32_t> found = evict(layer, what, 1);
      EXPECT_EQ(found, expected);
      EXPECT_EQ(evict(layer, what, 2), found);
      EXPECT_EQ(evict(layer, what, 3), found);
    }
  }
}

TEST_P(OnlineEvictionOf, GoesOnFromWhatIsHeld) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  const int first = shape.tokens / 2;
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer}) {
    const int held = first / 3;
    std::vector<std::int32_t> resident;
    std::vector<double> scores;
    for (int row = 0; row < rows_of(heads, shape.query_heads, shape.kv_heads); ++row) {
      for (int i = 0; i < held; ++i) {
        resident.push_back(i + 1 < held ? 2 * i + row % 2 : first - 1);
        scores.push_back(3.0 * uniform(chain(5, row, i)));
      }
    }
    for (const int budget : {1, held - 2, held, held + 9}) {
      const OnlineEviction what{.heads = heads,
                                .first = first,
                                .tokens = shape.tokens,
                                .resident = resident,
                                .scores = scores,
                                .budget = budget,
                                .recent = (budget + 1) / 2};
      EXPECT_EQ(evict(layer, what), reference_eviction(layer, what)) << static_cast<int>(heads) << ", " << budget;
    }
  }
}

TEST_P(OnlineEvictionOf, SeveralAreEachAsAlone) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  std::vector<OnlineEviction> all;
  std::vector<std::vector<std::int32_t>> expected;
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer})
    for (const int budget : {3, 20, 1000})
      for (const int tokens : {0, shape.tokens / 2, shape.tokens}) {
        all.push_back({.heads = heads, .tokens = tokens, .accumulate = budget != 20, .budget = budget});
        expected.push_back(reference_eviction(layer, all.back()));
      }
  for (const int threads : {1, 2, 5}) {
    const auto backend = tested_backend(threads);
    EXPECT_EQ(backend->online_evictions(layer.tensors(), all), expected);
    EXPECT_TRUE(backend->online_evictions(layer.tensors(), {}).empty());
  }
}

TEST_P(OnlineEvictionOf, ByTheNewestQueryAloneIsThatOfBruteForce) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer}) {
    for (const auto& [budget, recent] : {std::pair{1, 0}, {1, 1}, {7, 0}, {20, 1}, {33, 5}, {1000, 0}}) {
      SCOPED_TRACE(::testing::Message() << "heads " << static_cast<int>(heads) << ", budget " << budget);
      const OnlineEviction what{
          .heads = heads, .tokens = shape.tokens, .accumulate = false, .budget = budget, .recent = recent};
      const std::vector<std::int32_t> expected = reference_eviction(layer, what);
      EXPECT_EQ(evict(layer, what, 1), expected);
      EXPECT_EQ(evict(layer, what, 3), expected);
    }
  }
}

TEST_P(OnlineEvictionOf, TheNewestQueryAloneGoesOnFromWhatIsHeld) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  const int first = shape.tokens / 2, held = first / 3;
  for (const Heads heads : {Heads::kv, Heads::layer}) {
    std::vector<std::int32_t> resident;
    std::vector<double> scores;  // that no longer matter
    for (int row = 0; row < rows_of(heads, shape.query_heads, shape.kv_heads); ++row)
      for (int i = 0; i < held; ++i) {
        resident.push_back(2 * i + row % 2);
        scores.push_back(3.0 * uniform(chain(5, row, i)));
      }
    for (const int budget : {1, held - 2, held + 9}) {
      const OnlineEviction what{.heads = heads,
                                .first = first,
                                .tokens = shape.tokens,
                                .resident = resident,
                                .scores = scores,
                                .accumulate = false,
                                .budget = budget,
                                .recent = 0};
      EXPECT_EQ(evict(layer, what), reference_eviction(layer, what)) << static_cast<int>(heads) << ", " << budget;
    }
  }
}

TEST_P(OnlineEvictionOf, NeverEvictsSinks) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer}) {
    for (const auto& [budget, recent, sinks] :
         {std::tuple{7, 1, 3}, {7, 3, 4}, {20, 5, 1}, {5, 0, 5}, {5, 0, 9}, {1, 0, 1}}) {
      SCOPED_TRACE(::testing::Message() << "heads " << static_cast<int>(heads) << ", sinks " << sinks);
      const OnlineEviction what{
          .heads = heads, .tokens = shape.tokens, .budget = budget, .recent = recent, .sinks = sinks};
      const std::vector<std::int32_t> found = evict(layer, what);
      EXPECT_EQ(found, reference_eviction(layer, what));
      const int rows = rows_of(heads, shape.query_heads, shape.kv_heads);
      for (int row = 0; row < rows; ++row)
        for (int j = 0; j < std::min({sinks, budget, shape.tokens}); ++j)
          EXPECT_EQ(found[static_cast<std::size_t>(row * shape.tokens + j)], -1) << "row " << row << ", sink " << j;
    }
    GrowingBudget growing(shape.tokens, 1, 3);
    for (int t = 0, held = 0; t < shape.tokens; ++t) {
      const auto i = static_cast<std::size_t>(t);
      if (t < 4) held = std::min(held + 1, growing.budgets[i]);
      growing.recents[i] = std::min(growing.recents[i], growing.budgets[i] - held);
    }
    OnlineEviction what = growing.of({.heads = heads, .tokens = shape.tokens});
    what.sinks = 4;
    EXPECT_EQ(evict(layer, what), reference_eviction(layer, what)) << "sinks that find no room at first";
  }
}

TEST_P(OnlineEvictionOf, GrowsWithTheTokens) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  const int first = shape.tokens / 2;
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer}) {
    for (const auto& [begin, every] : {std::pair{1, 10}, {2, 3}, {5, 2}, {1, 1}}) {
      SCOPED_TRACE(::testing::Message() << "heads " << static_cast<int>(heads) << ", one in " << every);
      const GrowingBudget growing(shape.tokens, begin, every);
      const OnlineEviction what = growing.of({.heads = heads, .tokens = shape.tokens});
      const std::vector<std::int32_t> expected = reference_eviction(layer, what);
      EXPECT_EQ(evict(layer, what, 1), expected);
      EXPECT_EQ(evict(layer, what, 3), expected);

      const auto held = static_cast<std::size_t>(growing.budgets[static_cast<std::size_t>(first) - 1]);
      std::vector<std::int32_t> resident;
      std::vector<double> scores;
      for (int row = 0; row < rows_of(heads, shape.query_heads, shape.kv_heads); ++row)
        for (std::size_t i = 0; i < std::min(held, static_cast<std::size_t>(first)); ++i) {
          resident.push_back(static_cast<std::int32_t>(i));
          scores.push_back(3.0 * uniform(chain(5, row, i)));
        }
      const OnlineEviction later =
          growing.of({.heads = heads, .first = first, .tokens = shape.tokens, .resident = resident, .scores = scores});
      EXPECT_EQ(evict(layer, later), reference_eviction(layer, later)) << "from what is held";

      std::vector<std::int32_t> recents = growing.recents;
      recents[static_cast<std::size_t>(first)] = -1;  // that of a token that does not come
      OnlineEviction none = later;
      none.tokens = first;
      none.recents = std::span<const std::int32_t>(recents).first(static_cast<std::size_t>(first));
      EXPECT_EQ(evict(layer, none),
                std::vector<std::int32_t>(resident.size() / held * static_cast<std::size_t>(first), -1));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, OnlineEvictionOf,
    ::testing::Values(LayerShape{.query_heads = 4, .kv_heads = 2, .tokens = 90, .dim = 8},
                      LayerShape{.query_heads = 9, .kv_heads = 3, .tokens = 151, .dim = 33, .spread = 1.5},
                      LayerShape{.query_heads = 14, .kv_heads = 1, .tokens = 70, .dim = 20, .dtype = DType::float16},
                      LayerShape{.query_heads = 2, .kv_heads = 2, .tokens = 77, .dim = 16, .dtype = DType::bfloat16},
                      LayerShape{.query_heads = 6, .kv_heads = 2, .tokens = 120, .dim = 13, .dtype = DType::bfloat16},
                      LayerShape{.query_heads = 4, .kv_heads = 2, .tokens = 130, .dim = 8, .sliding_window = 12},
                      LayerShape{.query_heads = 4, .kv_heads = 2, .tokens = 100, .dim = 8, .sliding_window = 1},
                      LayerShape{
                          .query_heads = 4, .kv_heads = 2, .tokens = 90, .dim = 8, .spread = 3.0, .softcap = 5.0F},
                      LayerShape{.query_heads = 4, .kv_heads = 2, .tokens = 150, .dim = 8, .chunk = 40},
                      LayerShape{.query_heads = 6, .kv_heads = 2, .tokens = 90, .dim = 8, .sink_logits = true},
                      LayerShape{.query_heads = 4, .kv_heads = 2, .tokens = 60, .dim = 8, .chunk = 1}));

TEST(OnlineEvictionWith, EverySimdLevelIsThatOfBruteForce) {
  for (const int window : {0, 40}) {
    const RandomLayer layer({.query_heads = 6, .kv_heads = 2, .tokens = 200, .dim = 20, .sliding_window = window});
    for (const Heads heads : {Heads::kv, Heads::query, Heads::layer}) {
      for (const bool accumulate : {true, false}) {
        const OnlineEviction what{.heads = heads, .tokens = 200, .accumulate = accumulate, .budget = 50, .recent = 10};
        const std::vector<std::int32_t> expected = reference_eviction(layer, what);
        EXPECT_GE(at_every_simd_level([&](const char* level) { EXPECT_EQ(evict(layer, what), expected) << level; }), 1);
      }
    }
  }
}

TEST(OnlineEvictionWith, ATokenThatHadAllAttentionLeavesTheRestExactWhenItGoes) {
  // All queries look at the tokens 45 and 46, until the window has passed by them: what the others have of their
  // attention lies far below what one number of float32 spans, and must come back.
  RandomLayer layer({.query_heads = 4, .kv_heads = 2, .tokens = 140, .dim = 8, .sliding_window = 25});
  for (int token = 0; token < 140; ++token)
    for (int head = 0; head < 4; ++head) layer.q.set(head, token, 0, 20.0F);
  for (int head = 0; head < 2; ++head)
    for (const int token : {45, 46}) layer.k.set(head, token, 0, 100.0F);
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer}) {
    const OnlineEviction what{.heads = heads, .tokens = 140, .budget = 20, .recent = 3};
    const std::vector<std::int32_t> expected = reference_eviction(layer, what);
    EXPECT_GE(at_every_simd_level([&](const char* level) { EXPECT_EQ(evict(layer, what), expected) << level; }), 1);
  }
}

TEST(OnlineEvictionWith, EqualScoresLoseTheHigherPosition) {
  // All keys are equal, so whoever has been held as long as another has its score, whatever slot it lies in.
  RandomLayer layer({.query_heads = 2, .kv_heads = 1, .tokens = 120, .dim = 8});
  for (int token = 0; token < 120; ++token)
    for (int c = 0; c < 8; ++c) layer.k.set(0, token, c, 0.3F);
  const auto resident = range(0, 60);
  const std::vector<double> scores(60, 1.0);
  const OnlineEviction what{
      .first = 60, .tokens = 120, .resident = resident, .scores = scores, .budget = 60, .recent = 2};
  const std::vector<std::int32_t> found = evict(layer, what);
  // After query 60 the last two are 59 and 60: of the equal ones 58 goes. Then 59 is one of them. From then on every
  // newcomer has the lowest score as soon as it may go.
  std::vector<std::int32_t> expected(120, -1);
  expected[58] = 60;
  for (int token = 59; token < 118; ++token) expected[static_cast<std::size_t>(token)] = token + 2;
  EXPECT_EQ(found, expected);
}

TEST(OnlineEvictionWith, ANewcomerThatNoQueryHeedsGoesAtOnceWhereItMay) {
  RandomLayer layer({.query_heads = 2, .kv_heads = 1, .tokens = 60, .dim = 8});
  for (int token = 0; token < 60; ++token) {
    for (int head = 0; head < 2; ++head) layer.q.set(head, token, 0, 20.0F);
    layer.k.set(0, token, 0, token < 8 ? 3.0F : -3.0F);
  }
  const OnlineEviction what{.tokens = 60, .accumulate = false, .budget = 8, .recent = 0};
  const std::vector<std::int32_t> found = evict(layer, what);
  for (int token = 0; token < 60; ++token) EXPECT_EQ(found[static_cast<std::size_t>(token)], token < 8 ? -1 : token);
}

TEST(OnlineEvictionWith, TheLastTokensNeverGo) {
  const RandomLayer layer({.query_heads = 2, .kv_heads = 1, .tokens = 50, .dim = 8});
  const std::vector<std::int32_t> found = evict(layer, {.tokens = 50, .budget = 6, .recent = 6});
  for (int token = 0; token < 50; ++token)
    EXPECT_EQ(found[static_cast<std::size_t>(token)], token < 44 ? token + 6 : -1);
}

TEST(OnlineEvictionWith, NumbersThatAreNoneAreRefused) {
  RandomLayer layer({.tokens = 60});
  layer.k.set(1, 30, 3, std::nanf(""));
  EXPECT_THROW(evict(layer, {.tokens = 60, .budget = 40}), Error);
}

TEST(OnlineEvictionWith, QueriesThatAreNotStoredAreRefused) {
  const RandomLayer layer({.tokens = 60, .first_stored_query = 20});
  EXPECT_THROW(evict(layer, {.tokens = 60, .budget = 40}), Error);
}

}  // namespace
}  // namespace kvreplay::testing
