#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "tests/unit/attention_reference.h"

namespace kvreplay::testing {
namespace {

class CudaOnlineEviction : public ::testing::TestWithParam<LayerShape> {};

TEST_P(CudaOnlineEviction, IsThatOfTheCpu) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  const auto cpu = make_backend("cpu", 1), cuda = make_backend("cuda", 1);
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer}) {
    for (const auto& [budget, recent] : {std::pair{1, 1}, {7, 7}, {33, 5}}) {
      const OnlineEviction what{.heads = heads, .tokens = shape.tokens, .budget = budget, .recent = recent};
      EXPECT_EQ(cuda->online_eviction(layer.tensors(), what), cpu->online_eviction(layer.tensors(), what))
          << "heads " << static_cast<int>(heads) << ", budget " << budget;
    }
    const OnlineEviction newest{.heads = heads, .tokens = shape.tokens, .accumulate = false, .budget = 19, .recent = 0};
    EXPECT_EQ(cuda->online_eviction(layer.tensors(), newest), cpu->online_eviction(layer.tensors(), newest))
        << "heads " << static_cast<int>(heads) << ", by the newest query alone";
  }
}

TEST_P(CudaOnlineEviction, NeverEvictsSinksAsOnTheCpu) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  const auto cpu = make_backend("cpu", 1), cuda = make_backend("cuda", 1);
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer})
    for (const auto& [budget, recent, sinks] : {std::tuple{19, 5, 3}, {7, 3, 4}, {5, 0, 9}}) {
      const OnlineEviction what{
          .heads = heads, .tokens = shape.tokens, .budget = budget, .recent = recent, .sinks = sinks};
      EXPECT_EQ(cuda->online_eviction(layer.tensors(), what), cpu->online_eviction(layer.tensors(), what))
          << "heads " << static_cast<int>(heads) << ", sinks " << sinks;
    }
}

TEST_P(CudaOnlineEviction, GrowsWithTheTokensAsOnTheCpu) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  const auto cpu = make_backend("cpu", 1), cuda = make_backend("cuda", 1);
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer})
    for (const auto& [begin, every] : {std::pair{1, 10}, {2, 3}, {5, 2}}) {
      const GrowingBudget growing(shape.tokens, begin, every);
      const OnlineEviction what = growing.of({.heads = heads, .tokens = shape.tokens});
      EXPECT_EQ(cuda->online_eviction(layer.tensors(), what), cpu->online_eviction(layer.tensors(), what))
          << "heads " << static_cast<int>(heads) << ", one in " << every;
    }
}

TEST_P(CudaOnlineEviction, GoesOnFromWhatIsHeld) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  const auto cpu = make_backend("cpu", 1), cuda = make_backend("cuda", 1);
  const int first = shape.tokens / 2;
  const int held = first / 3;
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer}) {
    std::vector<std::int32_t> resident;
    std::vector<double> scores;
    for (int row = 0; row < rows_of(heads, shape.query_heads, shape.kv_heads); ++row) {
      for (int i = 0; i < held; ++i) {
        resident.push_back(i + 1 < held ? 2 * i + row % 2 : first - 1);
        scores.push_back(3.0 * uniform(chain(5, row, i)));
      }
    }
    for (const int budget : {1, held - 2, held + 9}) {
      for (const int recent : {(budget + 1) / 2, budget}) {
        const OnlineEviction what{.heads = heads,
                                  .first = first,
                                  .tokens = shape.tokens,
                                  .resident = resident,
                                  .scores = scores,
                                  .budget = budget,
                                  .recent = recent};
        EXPECT_EQ(cuda->online_eviction(layer.tensors(), what), cpu->online_eviction(layer.tensors(), what))
            << "heads " << static_cast<int>(heads) << ", budget " << budget << ", recent " << recent;
      }
    }
  }
}

// More than 128 tokens come in several launches.
INSTANTIATE_TEST_SUITE_P(
    Shapes, CudaOnlineEviction,
    ::testing::Values(LayerShape{.query_heads = 4, .kv_heads = 2, .tokens = 90, .dim = 8},
                      LayerShape{.query_heads = 9, .kv_heads = 3, .tokens = 101, .dim = 33, .spread = 1.5},
                      LayerShape{.query_heads = 14, .kv_heads = 1, .tokens = 70, .dim = 20, .dtype = DType::float16},
                      LayerShape{.query_heads = 2, .kv_heads = 2, .tokens = 77, .dim = 66, .dtype = DType::bfloat16},
                      LayerShape{.query_heads = 4, .kv_heads = 2, .tokens = 180, .dim = 8, .sliding_window = 12},
                      LayerShape{.query_heads = 4, .kv_heads = 2, .tokens = 60, .dim = 8, .sliding_window = 1},
                      LayerShape{
                          .query_heads = 4, .kv_heads = 2, .tokens = 90, .dim = 8, .spread = 3.0, .softcap = 5.0F},
                      LayerShape{.query_heads = 4, .kv_heads = 2, .tokens = 150, .dim = 8, .chunk = 40},
                      LayerShape{.query_heads = 6, .kv_heads = 2, .tokens = 90, .dim = 8, .sink_logits = true},
                      LayerShape{.query_heads = 4, .kv_heads = 2, .tokens = 60, .dim = 8, .chunk = 1}));

TEST(CudaOnlineEvictionWith, ManyHeldTokensAreThoseOfTheCpu) {
  const RandomLayer layer({.query_heads = 2, .kv_heads = 1, .tokens = 560, .dim = 8});
  const OnlineEviction what{.tokens = 560, .budget = 400, .recent = 40};
  EXPECT_EQ(make_backend("cuda", 1)->online_eviction(layer.tensors(), what),
            make_backend("cpu", 1)->online_eviction(layer.tensors(), what));
}

TEST(CudaOnlineEvictionWith, HeldTensorsAndFewHeadsAtATimeGiveTheSame) {
  const RandomLayer layer({.query_heads = 6, .kv_heads = 3, .tokens = 100, .dim = 8});
  const auto roomy = make_backend("cuda", 1), narrow = make_backend("cuda", 1, {.memory = 700 << 10});
  roomy->hold(layer.tensors(), true);
  for (const Heads heads : {Heads::kv, Heads::query}) {
    // Each row holds other tokens, the last ones with the lowest scores.
    std::vector<std::int32_t> resident;
    std::vector<double> scores;
    for (int row = 0; row < rows_of(heads, 6, 3); ++row) {
      for (int i = 0; i < 6; ++i) {
        resident.push_back(7 * i + 6 - row);
        scores.push_back(12.0 - i);
      }
    }
    const OnlineEviction what{
        .heads = heads, .first = 42, .tokens = 100, .resident = resident, .scores = scores, .budget = 10, .recent = 8};
    const std::vector<std::int32_t> expected = make_backend("cpu", 1)->online_eviction(layer.tensors(), what);
    EXPECT_EQ(roomy->online_eviction(layer.tensors(), what), expected);
    EXPECT_EQ(narrow->online_eviction(layer.tensors(), what), expected);
  }
  roomy->let_go(layer.tensors());
}

TEST(CudaOnlineEvictionWith, EqualKeysHaveEqualScoresWhereverTheyStand) {
  // Whoever has been held as long as another has its score: of the equal ones 58 goes after query 60, then every
  // newcomer as soon as it may.
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    RandomLayer layer({.query_heads = 2, .kv_heads = 1, .tokens = 250, .dim = 8, .dtype = dtype});
    for (int token = 0; token < 250; ++token)
      for (int c = 0; c < 8; ++c) layer.k.set(0, token, c, 0.3F);
    const auto resident = range(0, 60);
    const std::vector<double> scores(60, 1.0);
    const OnlineEviction what{
        .first = 60, .tokens = 250, .resident = resident, .scores = scores, .budget = 60, .recent = 2};
    std::vector<std::int32_t> expected(250, -1);
    expected[58] = 60;
    for (int token = 59; token < 248; ++token) expected[static_cast<std::size_t>(token)] = token + 2;
    EXPECT_EQ(make_backend("cuda", 1)->online_eviction(layer.tensors(), what), expected) << name_of(dtype);
  }
}

TEST(CudaOnlineEvictionWith, ATokenThatHadAllAttentionLeavesTheRestExactWhenItGoes) {
  RandomLayer layer({.query_heads = 4, .kv_heads = 2, .tokens = 140, .dim = 8, .sliding_window = 25});
  for (int token = 0; token < 140; ++token)
    for (int head = 0; head < 4; ++head) layer.q.set(head, token, 0, 20.0F);
  for (int head = 0; head < 2; ++head)
    for (const int token : {45, 46}) layer.k.set(head, token, 0, 100.0F);
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer}) {
    const OnlineEviction what{.heads = heads, .tokens = 140, .budget = 20, .recent = 3};
    EXPECT_EQ(make_backend("cuda", 1)->online_eviction(layer.tensors(), what), reference_eviction(layer, what));
  }
}

TEST(CudaOnlineEvictionWith, NumbersThatAreNoneAreRefused) {
  for (const float none : {std::nanf(""), HUGE_VALF}) {
    RandomLayer layer({.tokens = 60});
    layer.k.set(1, 30, 3, none);
    EXPECT_THROW(make_backend("cuda", 1)->online_eviction(layer.tensors(), {.tokens = 60, .budget = 40}), Error);
  }
}

TEST(CudaOnlineEvictionWith, QueriesThatAreNotStoredAreRefused) {
  const RandomLayer layer({.tokens = 60, .first_stored_query = 20});
  EXPECT_THROW(make_backend("cuda", 1)->online_eviction(layer.tensors(), {.tokens = 60, .budget = 40}), Error);
}

}  // namespace
}  // namespace kvreplay::testing
