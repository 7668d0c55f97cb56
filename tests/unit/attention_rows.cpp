#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "attention_reference.h"
#include "error.h"

namespace kvreplay::testing {
namespace {

constexpr int resident_tokens = 70;

/// From the query on at which `resident_tokens` are resident, every row evicts a random token after each query, every
/// ninth time its newest one; every fourth query evicts a second one, and the next none.
class ChangingTokens {
 public:
  ChangingTokens(const LayerShape& shape, int rows, std::span<const std::int32_t> queries) {
    what.queries = queries;
    what.rows = rows;
    for (int row = 0; row < rows; ++row) {
      std::vector<std::int32_t> resident, evicted(static_cast<std::size_t>(shape.tokens), -1);
      for (int t = 0; t < shape.tokens; ++t) {
        resident.push_back(t);
        const int evictions = t < resident_tokens ? 0 : t % 4 == 0 ? 2 : t % 4 == 1 ? 0 : 1;
        for (int i = 0; i < evictions; ++i) {
          const std::size_t last = resident.size() - 1;
          const auto number =
              t % 9 == 0 ? last
                         : static_cast<std::size_t>(uniform(chain(5, row, t, i)) * 0.99 * static_cast<double>(last));
          evicted[static_cast<std::size_t>(resident[number])] = t;
          resident.erase(resident.begin() + static_cast<std::ptrdiff_t>(number));
        }
      }
      // Those that some query sees: as many in each row.
      for (int t = 0; t <= queries.back(); ++t) {
        const std::int32_t at = evicted[static_cast<std::size_t>(t)];
        if (at >= 0 && at < queries.front()) continue;
        tokens_.push_back(t);
        evicted_at_.push_back(at);
      }
    }
    what.tokens = tokens_;
    what.evicted_at = evicted_at_;
  }
  ChangingTokens(const ChangingTokens&) = delete;
  ChangingTokens& operator=(const ChangingTokens&) = delete;

  /// [rows, n] tokens that a query sees.
  std::vector<std::int32_t> resident_to(std::int32_t query) const {
    std::vector<std::int32_t> resident;
    for (std::size_t i = 0; i < tokens_.size(); ++i)
      if (tokens_[i] <= query && (evicted_at_[i] == -1 || query <= evicted_at_[i])) resident.push_back(tokens_[i]);
    return resident;
  }

  AttentionRows what;

 private:
  std::vector<std::int32_t> tokens_, evicted_at_;
};

class AttentionRowsOf : public ::testing::TestWithParam<LayerShape> {};

TEST_P(AttentionRowsOf, AreThoseOfBruteForce) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  const auto queries = range(shape.tokens - 40, shape.tokens, 3);
  for (const Positions positions : {Positions::original, Positions::cache}) {
    if (positions == Positions::cache && shape.rope_pairs == 0) continue;
    ChangingTokens tokens(shape, shape.kv_heads, queries);
    tokens.what.positions = positions;
    const auto rows = tested_backend(2)->attention_rows(layer.tensors(), tokens.what);
    ASSERT_EQ(rows.size(), queries.size());
    for (std::size_t i = 0; i < queries.size(); ++i) {
      const std::vector<std::int32_t> resident = tokens.resident_to(queries[i]);
      const Matrix expected = reference_sums(layer, {.queries = std::span(queries).subspan(i, 1),
                                                     .resident = resident,
                                                     .resident_rows = shape.kv_heads,
                                                     .positions = positions});
      ASSERT_EQ(rows[i].rows(), shape.query_heads);
      ASSERT_EQ(rows[i].columns(), expected.columns());
      for (std::size_t cell = 0; cell < expected.values().size(); ++cell)
        ASSERT_NEAR(rows[i].values()[cell], expected.values()[cell], 3e-6 * std::max(1.0, shape.spread * shape.spread));
    }
  }
}

TEST_P(AttentionRowsOf, HaveTheBitsOfSumsOfOneQuery) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  const auto queries = range(shape.tokens - 61, shape.tokens);
  at_every_simd_level([&](const char* level) {
    for (const int rows : {1, shape.kv_heads}) {
      const ChangingTokens tokens(shape, rows, queries);
      for (const int threads : {1, 3}) {
        const auto backend = tested_backend(threads);
        const auto found = backend->attention_rows(layer.tensors(), tokens.what);
        const auto one_by_one = backend->Backend::attention_rows(layer.tensors(), tokens.what);
        ASSERT_EQ(found.size(), one_by_one.size());
        for (std::size_t i = 0; i < found.size(); ++i)
          ASSERT_TRUE(std::ranges::equal(found[i].values(), one_by_one[i].values())) << level << ", query " << i;
      }
    }
  });
}

TEST_P(AttentionRowsOf, AreTheColumnsThatAreWanted) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  const auto queries = range(shape.tokens - 61, shape.tokens);
  ChangingTokens tokens(shape, shape.kv_heads, queries);
  const auto backend = tested_backend(2);
  const auto all = backend->attention_rows(layer.tensors(), tokens.what);
  std::vector<NumberRange> wanted;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const int columns = all[i].columns(), first = static_cast<int>(i * i) % columns;
    wanted.push_back({first, first + static_cast<int>(7 * i) % (columns - first + 1)});
  }
  tokens.what.wanted = wanted;
  for (const auto& found : {backend->attention_rows(layer.tensors(), tokens.what),
                            backend->Backend::attention_rows(layer.tensors(), tokens.what)})
    for (std::size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(found[i].columns(), wanted[i].end - wanted[i].first);
      for (int head = 0; head < shape.query_heads; ++head)
        for (int column = 0; column < found[i].columns(); ++column)
          ASSERT_EQ(found[i](head, column), all[i](head, wanted[i].first + column)) << "query " << i;
    }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, AttentionRowsOf,
    ::testing::Values(
        LayerShape{.query_heads = 4, .kv_heads = 2, .tokens = 150, .dim = 8},
        LayerShape{.query_heads = 6, .kv_heads = 1, .tokens = 200, .dim = 33, .rope_pairs = 3},
        LayerShape{.query_heads = 9, .kv_heads = 3, .tokens = 170, .dim = 20, .dtype = DType::float16},
        LayerShape{.query_heads = 4, .kv_heads = 4, .tokens = 170, .dim = 64, .dtype = DType::bfloat16},
        LayerShape{.query_heads = 4, .kv_heads = 2, .tokens = 300, .dim = 8, .sliding_window = 20},
        LayerShape{.query_heads = 4, .kv_heads = 2, .tokens = 250, .dim = 8, .chunk = 33},
        LayerShape{.query_heads = 2, .kv_heads = 1, .tokens = 2600, .dim = 4, .sliding_window = 2300},
        LayerShape{.query_heads = 6, .kv_heads = 2, .tokens = 140, .dim = 16, .softcap = 5.0F, .sink_logits = true},
        // Logits so far apart that references are raised.
        LayerShape{.query_heads = 4, .kv_heads = 2, .tokens = 200, .dim = 64, .spread = 4.0},
        // More query heads than fit into a block of rows.
        LayerShape{.query_heads = 50, .kv_heads = 1, .tokens = 130, .dim = 8}));

TEST(AttentionRowsOf, ReadsNoTokenThatIsNotResident) {
  const LayerShape shape{.query_heads = 4, .kv_heads = 2, .tokens = 150, .dim = 8};
  const auto queries = range(100, 150);
  const ChangingTokens tokens(shape, 1, queries);
  RandomLayer layer(shape);
  const auto backend = tested_backend(2);
  const auto before = backend->attention_rows(layer.tensors(), tokens.what);
  const std::vector<std::int32_t> early = tokens.resident_to(100), late = tokens.resident_to(149);
  const auto evicted =
      std::ranges::find_if(early, [&](std::int32_t j) { return !std::ranges::binary_search(late, j); });
  ASSERT_NE(evicted, early.end());
  layer.k.set(1, *evicted, 0, std::numeric_limits<float>::quiet_NaN());
  AttentionRows last = tokens.what;
  last.queries = std::span(queries).last(1);
  const auto after = backend->attention_rows(layer.tensors(), last);
  EXPECT_TRUE(std::ranges::equal(after.front().values(), before.back().values()));
  EXPECT_THROW(backend->attention_rows(layer.tensors(), tokens.what), Error);
}

}  // namespace
}  // namespace kvreplay::testing
