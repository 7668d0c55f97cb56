#include <gtest/gtest.h>

#include <limits>

#include "attention_reference.h"
#include "error.h"

namespace kvreplay::testing {
namespace {

Matrix sums(const RandomLayer& layer, const AttentionSums& what, int threads = 2) {
  return tested_backend(threads)->attention_sums(layer.tensors(), what);
}

void expect_near(const Matrix& found, const Matrix& expected, double tolerance) {
  ASSERT_EQ(found.rows(), expected.rows());
  ASSERT_EQ(found.columns(), expected.columns());
  for (int row = 0; row < found.rows(); ++row)
    for (int column = 0; column < found.columns(); ++column)
      ASSERT_NEAR(found(row, column), expected(row, column), tolerance * (1.0 + expected(row, column)))
          << "row " << row << ", column " << column;
}

void expect_same_bits(const Matrix& a, const Matrix& b) {
  ASSERT_EQ(a.values().size(), b.values().size());
  for (std::size_t i = 0; i < a.values().size(); ++i) ASSERT_EQ(a.values()[i], b.values()[i]) << i;
}

const std::vector<LayerShape> shapes{
    {.query_heads = 4, .kv_heads = 2, .tokens = 33, .dim = 8},
    {.query_heads = 6, .kv_heads = 1, .tokens = 100, .dim = 33},  // multi-query
    {.query_heads = 2, .kv_heads = 2, .tokens = 257, .dim = 64},
    {.query_heads = 1, .kv_heads = 1, .tokens = 1, .dim = 1},
    {.query_heads = 3, .kv_heads = 1, .tokens = 31, .dim = 512},
    {.query_heads = 9, .kv_heads = 3, .tokens = 130, .dim = 20, .dtype = DType::float16},
    {.query_heads = 4, .kv_heads = 2, .tokens = 90, .dim = 16, .dtype = DType::bfloat16},
    {.query_heads = 4, .kv_heads = 2, .tokens = 300, .dim = 8, .sliding_window = 40},
    {.query_heads = 4, .kv_heads = 2, .tokens = 150, .dim = 8, .sliding_window = 1},
    {.query_heads = 4, .kv_heads = 2, .tokens = 120, .dim = 8, .spread = 3.0, .softcap = 5.0F},
    {.query_heads = 2, .kv_heads = 1, .tokens = 1500, .dim = 4},  // many segments, many folds of row sums
    {.query_heads = 8, .kv_heads = 1, .tokens = 70, .dim = 256, .dtype = DType::bfloat16},
    {.query_heads = 5, .kv_heads = 1, .tokens = 97, .dim = 127, .dtype = DType::bfloat16},
    {.query_heads = 3, .kv_heads = 3, .tokens = 33, .dim = 65, .dtype = DType::float16},
    {.query_heads = 1, .kv_heads = 1, .tokens = 1, .dim = 1, .dtype = DType::bfloat16},
    {.query_heads = 2, .kv_heads = 1, .tokens = 300, .dim = 32, .dtype = DType::bfloat16, .sliding_window = 70},
    {.query_heads = 2,
     .kv_heads = 1,
     .tokens = 130,
     .dim = 7,
     .dtype = DType::bfloat16,
     .spread = 3.0,
     .softcap = 5.0F},
    {.query_heads = 4, .kv_heads = 2, .tokens = 300, .dim = 8, .chunk = 70},
    {.query_heads = 2,
     .kv_heads = 1,
     .tokens = 300,
     .dim = 32,
     .dtype = DType::bfloat16,
     .sliding_window = 50,
     .chunk = 130},
    {.query_heads = 6, .kv_heads = 2, .tokens = 300, .dim = 16, .dtype = DType::bfloat16, .sink_logits = true},
    {.query_heads = 2, .kv_heads = 1, .tokens = 1500, .dim = 4, .softcap = 5.0F, .sink_logits = true},
};

class AttentionSumsOf : public ::testing::TestWithParam<LayerShape> {
 protected:
  void SetUp() override {
    if (refuses_heads_of(GetParam().dim)) GTEST_SKIP() << "heads of more numbers than the backend takes";
  }
};

TEST_P(AttentionSumsOf, AllQueriesAreThoseOfBruteForce) {
  const RandomLayer layer(GetParam());
  const auto queries = range(0, GetParam().tokens);
  const AttentionSums what{.queries = queries, .columns = GetParam().tokens};
  expect_near(sums(layer, what), reference_sums(layer, what), 2e-6);
}

TEST_P(AttentionSumsOf, SomeQueriesWithWeightsAndFewerColumns) {
  const RandomLayer layer(GetParam());
  const auto queries = range(GetParam().tokens / 2, GetParam().tokens, 3);
  std::vector<double> weights;
  for (std::size_t i = 0; i < queries.size(); ++i) weights.push_back(0.5 + static_cast<double>(i % 4));
  const AttentionSums what{
      .queries = queries, .weights = weights, .columns = (GetParam().tokens + 1) / 2, .own_key = false};
  expect_near(sums(layer, what), reference_sums(layer, what), 2e-6);
}

/// Counts, but for attention so near to the bound that float32 may put it on either side.
void expect_counts(const RandomLayer& layer, AttentionSums what) {
  const double above = what.above_uniform;
  const Matrix found = sums(layer, what);
  what.above_uniform = above * (1 - 2e-5);
  const Matrix most = reference_sums(layer, what);
  what.above_uniform = above * (1 + 2e-5);
  const Matrix least = reference_sums(layer, what);
  ASSERT_EQ(found.values().size(), most.values().size());
  std::size_t certain = 0;
  for (std::size_t i = 0; i < found.values().size(); ++i) {
    ASSERT_GE(found.values()[i], least.values()[i]) << i;
    ASSERT_LE(found.values()[i], most.values()[i]) << i;
    certain += least.values()[i] == most.values()[i] ? 1 : 0;
  }
  if (layer.shape().tokens > 1 && layer.shape().sliding_window != 1) {
    EXPECT_GE(certain, found.values().size() * 9 / 10);
  }
}

TEST_P(AttentionSumsOf, CountsQueriesThatGiveMoreThanTheUniformShare) {
  const RandomLayer layer(GetParam());
  const int tokens = GetParam().tokens;
  const auto all = range(0, tokens), some = range(tokens / 2, tokens, 3), last = range(tokens - 1, tokens);
  expect_counts(layer, {.queries = all, .columns = tokens, .above_uniform = 1.5});
  expect_counts(layer, {.queries = some, .columns = (tokens + 1) / 2, .own_key = false, .above_uniform = 0.7});
  at_every_simd_level(
      [&](const char*) { expect_counts(layer, {.queries = last, .columns = tokens, .above_uniform = 2.0}); });
}

TEST_P(AttentionSumsOf, HasTheSameBitsForAnyNumberOfThreads) {
  const RandomLayer layer(GetParam());
  const auto queries = range(0, GetParam().tokens);
  for (const int first : {0, GetParam().tokens - std::min(GetParam().tokens, 5)}) {
    const AttentionSums what{.queries = std::span(queries).subspan(static_cast<std::size_t>(first)),
                             .columns = GetParam().tokens};
    at_every_simd_level([&](const char*) {
      const Matrix one = sums(layer, what, 1);
      for (const int threads : {2, 3, 5}) expect_same_bits(sums(layer, what, threads), one);
    });
  }
}

TEST_P(AttentionSumsOf, FewQueriesFillNoPanel) {
  const RandomLayer layer(GetParam());
  at_every_simd_level([&](const char*) {
    for (int count = 1; count <= std::min(GetParam().tokens, 13); ++count) {
      const auto queries = range(GetParam().tokens - count, GetParam().tokens);
      const AttentionSums what{.queries = queries, .columns = GetParam().tokens};
      expect_near(sums(layer, what), reference_sums(layer, what), 2e-6);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionSumsOf, ::testing::ValuesIn(shapes));

class ResidentSums : public ::testing::TestWithParam<LayerShape> {};

TEST_P(ResidentSums, RunOverTheListAlone) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  // Queries are the last tokens, which are resident; the lists of the KV heads differ.
  const auto queries = range(shape.tokens - 5, shape.tokens);
  std::vector<std::int32_t> resident;
  for (int row = 0; row < shape.kv_heads; ++row) {
    for (int i = 0; i < 40; ++i) resident.push_back(2 * i + (row + i) % 2);
    resident.insert(resident.end(), queries.begin(), queries.end());
  }
  for (const Positions positions : {Positions::original, Positions::cache}) {
    AttentionSums what{
        .queries = queries, .resident = resident, .resident_rows = shape.kv_heads, .positions = positions};
    expect_near(sums(layer, what), reference_sums(layer, what), 3e-6);
    what.resident = std::span(resident).first(45);
    what.resident_rows = 1;
    what.own_key = false;
    expect_near(sums(layer, what), reference_sums(layer, what), 3e-6);
  }
}

TEST_P(ResidentSums, CountByTheShareOfWhatIsResident) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  // The lists differ in how many keys the first queries see.
  const auto queries = range(shape.tokens - 12, shape.tokens, 2);
  std::vector<std::int32_t> resident;
  for (int row = 0; row < shape.kv_heads; ++row) {
    for (int i = 0; i < 30; ++i) resident.push_back(2 * i + row % 2);
    const auto late = range(shape.tokens - 12 - row % 2, shape.tokens, 2);
    resident.insert(resident.end(), late.begin(), late.begin() + 6);
  }
  expect_counts(layer,
                {.queries = queries, .resident = resident, .resident_rows = shape.kv_heads, .above_uniform = 1.2});
  const std::span<const std::int32_t> one = std::span(resident).first(36);
  expect_counts(layer, {.queries = queries, .resident = one, .positions = Positions::cache, .above_uniform = 1.2});
}

TEST_P(ResidentSums, OfManyQueries) {
  const RandomLayer layer(GetParam());
  const auto queries = range(0, GetParam().tokens);
  const auto resident = range(0, GetParam().tokens, 3);
  const AttentionSums what{.queries = queries, .resident = resident};
  expect_near(sums(layer, what), reference_sums(layer, what), 3e-6);
}

TEST_P(ResidentSums, KeepTheOrderOfTheList) {
  // Those held before in any order, then the new ones, which are the queries.
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  const auto queries = range(shape.tokens - 25, shape.tokens, 2);
  std::vector<std::int32_t> resident;
  for (int row = 0; row < shape.kv_heads; ++row) {
    for (int i = 0; i < 37; ++i) resident.push_back(shape.tokens - 70 + (i * 11 + row) % 37);
    resident.insert(resident.end(), queries.begin(), queries.end());
  }
  for (const Positions positions : {Positions::original, Positions::cache}) {
    AttentionSums what{
        .queries = queries, .resident = resident, .resident_rows = shape.kv_heads, .positions = positions};
    expect_near(sums(layer, what), reference_sums(layer, what), 3e-6);
    what.own_key = false;
    expect_near(sums(layer, what), reference_sums(layer, what), 3e-6);
  }
}

TEST(AttentionSumsWith, KeysSeenBesideOthersInAListAreRefused) {
  const RandomLayer layer({.tokens = 64});
  const std::vector<std::int32_t> queries{10, 20};
  const std::vector<std::int32_t> resident{3, 15, 7, 10, 20};
  try {
    sums(layer, {.queries = queries, .resident = resident});
    FAIL() << "query 10 sees 3 and 7 but not 15";
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::usage);
    EXPECT_EQ(error.expected(), "the keys visible to query 10 in one contiguous range");
  }
}

const std::vector<LayerShape> rotated_shapes{
    {.tokens = 100, .dim = 8, .rope_pairs = 4},
    {.tokens = 100, .dim = 8, .rope_pairs = 4, .interleaved = true},
    {.tokens = 100, .dim = 12, .dtype = DType::bfloat16, .rope_pairs = 3},
    {.tokens = 100, .dim = 12, .rope_pairs = 2, .interleaved = true},
    {.query_heads = 6, .kv_heads = 1, .tokens = 100, .dim = 8},
    {.tokens = 300, .dim = 8, .sliding_window = 250, .rope_pairs = 4},
    {.tokens = 100, .dim = 12, .rope_pairs = 3, .rope_offset = 5},
    {.tokens = 100, .dim = 12, .dtype = DType::bfloat16, .rope_pairs = 3, .interleaved = true, .rope_offset = 5},
    {.tokens = 100, .dim = 8, .rope_pairs = 4, .chunk = 25, .sink_logits = true},
};

INSTANTIATE_TEST_SUITE_P(Styles, ResidentSums, ::testing::ValuesIn(rotated_shapes));

TEST(AttentionSumsWith, AUniformRowGivesNobodyMoreThanItsShare) {
  RandomLayer layer({.query_heads = 2, .kv_heads = 1, .tokens = 700, .dim = 8});
  for (int token = 0; token < 700; ++token)
    for (int c = 0; c < 8; ++c) layer.q.set(1, token, c, 0.0F);
  const auto queries = range(0, 700);
  const Matrix above = sums(layer, {.queries = queries, .columns = 700, .above_uniform = 1.0 + 1e-6});
  const Matrix not_below = sums(layer, {.queries = queries, .columns = 700, .above_uniform = 1.0 - 1e-6});
  for (int token = 0; token < 700; ++token) {
    EXPECT_EQ(above(1, token), 0.0) << token;
    EXPECT_EQ(not_below(1, token), 700.0 - token) << token;
  }
}

TEST(AttentionSumsWith, PartialQueriesReadTheStoredOnes) {
  const RandomLayer layer({.tokens = 64, .first_stored_query = 3, .stored_query_step = 7});
  const std::vector<std::int32_t> queries{10, 38, 59};
  const AttentionSums what{.queries = queries, .columns = 64};
  expect_near(sums(layer, what), reference_sums(layer, what), 2e-6);
  const std::vector<std::int32_t> missing{10, 12};
  try {
    sums(layer, {.queries = missing, .columns = 64});
    FAIL() << "query 12 is not stored";
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::input);
    EXPECT_STREQ(error.what(), "q: stored queries: expected a query at position 12, found none");
  }
}

TEST(AttentionSumsWith, EveryBitPatternOfFloat16IsWidenedExactly) {
  // One query against one key a token, values 0 and 1: the sums are a softmax of the widened numbers themselves.
  constexpr int tokens = 2048;
  std::vector<std::uint16_t> halves;  // positive subnormals and normals, up to 8
  for (int i = 0; i < tokens; ++i) halves.push_back(static_cast<std::uint16_t>(i * 9));
  const std::vector<float> widened = [&] {
    std::vector<float> numbers;
    for (const std::uint16_t half : halves) numbers.push_back(from_float16(half));
    return numbers;
  }();
  const TensorView half_view{reinterpret_cast<const std::byte*>(halves.data()), DType::float16, 1, tokens, 1};
  const TensorView float_view{reinterpret_cast<const std::byte*>(widened.data()), DType::float32, 1, tokens, 1};
  const auto backend = tested_backend(1);
  for (const double p : {1.0, 2.0})
    expect_same_bits(backend->norms(half_view, tokens, p), backend->norms(float_view, tokens, p));
  const auto queries = range(tokens - 3, tokens);
  LayerTensors half_layer, float_layer;
  half_layer.q = half_layer.k = half_layer.v = half_view;
  float_layer.q = float_layer.k = float_layer.v = float_view;
  const AttentionSums what{.queries = queries, .columns = tokens};
  const Matrix of_halves = backend->attention_sums(half_layer, what);
  const Matrix of_floats = backend->attention_sums(float_layer, what);
  if (tested_backend_name() == "cpu") {
    expect_same_bits(of_halves, of_floats);
  } else {  // other products, summed in another order
    expect_near(of_halves, of_floats, 1e-6);
  }
}

TEST(AttentionSumsWith, LargeLogitsNeitherOverflowNorVanish) {
  for (const double spread : {10.0, 60.0, 180.0}) {  // logits up to about 50, 2,000, 20,000 in size
    LayerShape shape{.query_heads = 2, .kv_heads = 1, .tokens = 200, .dim = 8, .spread = spread};
    RandomLayer layer(shape);
    // Keys that grow: every row's largest logit stands late.
    for (int token = 0; token < shape.tokens; ++token)
      for (int c = 0; c < shape.dim; ++c)
        layer.k.set(0, token, c, static_cast<float>(layer.k.at(0, token, c) * token / shape.tokens));
    const auto queries = range(0, shape.tokens);
    const AttentionSums what{.queries = queries, .columns = shape.tokens};
    // A logit z is known to about 1e-7 * z.
    expect_near(sums(layer, what), reference_sums(layer, what), 1e-7 * spread * spread);
    const Matrix one = sums(layer, what, 1);
    expect_same_bits(sums(layer, what, 3), one);
    for (int head = 0; head < 2; ++head) {
      double total = 0.0;
      for (const double sum : one.row(head)) total += sum;
      EXPECT_NEAR(total, shape.tokens, 1e-4);
    }
  }
}

TEST(AttentionSumsWith, AHugeLogitAfterAReferenceFarBelowIsRepaired) {
  // The first tile holds logits of -9,000 or so, a late key one of +9,000: nothing but it is attended to.
  LayerShape shape{.query_heads = 1, .kv_heads = 1, .tokens = 400, .dim = 4};
  RandomLayer layer(shape);
  for (int token = 0; token < shape.tokens; ++token) {
    for (int c = 0; c < shape.dim; ++c) {
      layer.q.set(0, token, c, 100.0F);
      layer.k.set(0, token, c, token == 300 ? 45.0F : -45.0F);
    }
  }
  const std::vector<std::int32_t> queries = range(350, 400);
  const Matrix found = sums(layer, {.queries = queries, .columns = 400});
  for (int token = 0; token < 400; ++token) EXPECT_EQ(found(0, token), token == 300 ? 50.0 : 0.0) << token;
}

TEST(AttentionSumsWith, ALogitOfMinusMillionsCountsForNothing) {
  LayerShape shape{.query_heads = 1, .kv_heads = 1, .tokens = 400, .dim = 4};
  RandomLayer layer(shape);
  for (int token = 0; token < shape.tokens; ++token) {
    for (int c = 0; c < shape.dim; ++c) {
      layer.q.set(0, token, c, 1000.0F);
      layer.k.set(0, token, c, token == 200 ? -5500.0F : 1.0F);
    }
  }
  const std::vector<std::int32_t> queries = range(300, 400);
  const Matrix found = sums(layer, {.queries = queries, .columns = 300});
  EXPECT_EQ(found(0, 200), 0.0);
  EXPECT_EQ(found(0, 199), found(0, 0));
  EXPECT_GT(found(0, 0), 0.1);
}

TEST(AttentionSumsWith, WeightsOfManySizesKeepTheBitsForAnyNumberOfThreads) {
  // Sums of numbers of one size are exact in float64 in any order; these are not.
  const RandomLayer layer({.query_heads = 2, .kv_heads = 1, .tokens = 1500, .dim = 4});
  const auto queries = range(0, 1500);
  std::vector<double> weights;
  for (const int t : queries) weights.push_back(std::exp2(t / 100 * 37 % 81 - 40));
  const AttentionSums what{.queries = queries, .weights = weights, .columns = 1500};
  const Matrix one = sums(layer, what, 1);
  expect_near(one, reference_sums(layer, what), 1e-5);
  expect_same_bits(sums(layer, what, 2), one);
  expect_same_bits(sums(layer, what, 3), one);
}

TEST(AttentionSumsWith, EqualKeysHaveEqualSumsWhereverTheyStand) {
  for (const LayerShape& shape : {LayerShape{.tokens = 700, .dim = 33, .spread = 2.0},
                                  LayerShape{.tokens = 700, .dim = 8, .spread = 3.0, .softcap = 20.0F}}) {
    RandomLayer layer(shape);
    const std::vector<int> equal{0, 1, 17, 31, 32, 300, 511, 600};
    for (const int token : equal)
      for (int head = 0; head < shape.kv_heads; ++head)
        for (int c = 0; c < shape.dim; ++c) layer.k.set(head, token, c, 0.25F * static_cast<float>(c % 5));
    // Few queries, and many: keys packed as they are used, and before.
    for (const int first : {690, 601}) {
      const auto queries = range(first, 700);
      const Matrix found = sums(layer, {.queries = queries, .columns = 700});
      for (int head = 0; head < shape.query_heads; ++head)
        for (const int token : equal) EXPECT_EQ(found(head, token), found(head, 0)) << token;
    }
  }
}

TEST(AttentionSumsWith, ALongRowDoesNotDriftFromOne) {
  // Equal keys: a float32 sum over all of them would be off by 1e-5.
  constexpr int tokens = 1 << 16;
  RandomLayer layer({.query_heads = 8, .kv_heads = 1, .tokens = tokens, .dim = 4, .first_stored_query = tokens - 1});
  for (int token = 0; token < tokens; ++token)
    for (int c = 0; c < 4; ++c) layer.k.set(0, token, c, 0.25F * static_cast<float>(c + 1));
  const Matrix found = sums(layer, {.queries = range(tokens - 1, tokens), .columns = 1});
  for (int head = 0; head < 8; ++head) EXPECT_NEAR(found(head, 0) * tokens, 1.0, 1.5e-6) << head;
}

TEST(AttentionSumsWith, EqualKeysCountAlikeWhereTheirExponentialsReachZero) {
  // Logits about 110 and 126 log 2 below the largest, where what is left counts as 0 by one backend or another; tiles
  // that a query sees whole, in part, and first.
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    RandomLayer layer({.query_heads = 2, .kv_heads = 1, .tokens = 200, .dim = 8, .dtype = dtype, .spread = 0.05});
    const std::vector<int> equal{1, 40, 70, 96, 130, 161, 170};
    for (int c = 0; c < 8; ++c)
      for (int token = 0; token < 200; ++token)
        for (int head = 0; head < 2; ++head)
          layer.q.set(head, token, c, static_cast<float>(1.0 + layer.q.at(head, token, c)));
    at_every_simd_level([&](const char* level) {
      int zeros = 0;
      int others = 0;
      for (const float low : {-27.0F, -31.0F}) {
        for (int c = 0; c < 8; ++c)
          for (const int token : equal) layer.k.set(0, token, c, low);
        for (int query = 171; query < 200; ++query) {
          const std::vector<std::int32_t> queries{query};
          const Matrix found = sums(layer, {.queries = queries, .columns = 200});
          for (int head = 0; head < 2; ++head) {
            (found(head, 1) == 0.0 ? zeros : others) += 1;
            for (const int token : equal) ASSERT_EQ(found(head, token), found(head, 1)) << level << ' ' << token;
          }
        }
      }
      EXPECT_GT(zeros, 0);
      EXPECT_GT(others, 0);
    });
  }
}

TEST(AttentionSumsWith, NumbersThatAreNoneAreRefused) {
  // Of a NaN, the bits that say nothing must not turn it into a number either.
  const float with_payload = std::bit_cast<float>(0x7FC12345U), negative = std::bit_cast<float>(0xFFC00001U);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), with_payload, negative}) {
    for (const int token : {0, 5, 150}) {
      for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
        RandomLayer layer({.tokens = 200, .dtype = dtype});
        layer.k.set(1, token, 3, bad);
        const auto queries = range(0, 200);
        at_every_simd_level([&](const char* level) {
          EXPECT_THROW(sums(layer, {.queries = queries, .columns = 200}), Error) << level << bad << " at " << token;
        });
      }
    }
  }
}

TEST(SimdLevels, AgreeAndAreNamed) {
  const RandomLayer layer({.tokens = 300, .dim = 20, .dtype = DType::float16, .sliding_window = 200});
  const auto queries = range(0, 300);
  const AttentionSums what{.queries = queries, .columns = 300};
  const Matrix expected = reference_sums(layer, what);
  const int levels = at_every_simd_level([&](const char* level) {
    EXPECT_NE(tested_backend(1)->description().find(level), std::string::npos) << level;
    expect_near(sums(layer, what), expected, 2e-6);
  });
  EXPECT_GE(levels, 1);
}

TEST(SimdLevels, ABackendKeepsTheOneItWasMadeAt) {
  const RandomLayer layer({.tokens = 150, .dim = 20});
  const LayerTensors tensors = layer.tensors();
  const auto queries = range(0, 150);
  KeptSet half(Heads::layer, 1, 140);
  half.keep(0, 0, 70);
  const KeptSets set(&half, 1);
  const auto answers = [&](Backend& backend) {
    const KeptMoments moments = backend.kept_moments(tensors, std::span(queries).last(9), 140, std::span(&set, 1));
    std::vector<double> all{moments.kept.front().mass, moments.kept.front().output_dot};
    const Matrix sums = backend.attention_sums(tensors, {.queries = queries, .columns = 150});
    all.insert(all.end(), sums.values().begin(), sums.values().end());
    for (const double cosine : backend.similarity_row_maxima(tensors.k, 150)) all.push_back(cosine);
    const Matrix norms = backend.norms(tensors.k, 150, 2);
    all.insert(all.end(), norms.values().begin(), norms.values().end());
    for (const int token : backend.online_eviction(tensors, {.tokens = 150, .budget = 40})) all.push_back(token);
    for (const int token : backend.least_redundant(tensors, {.resident = queries, .keep = 60})) all.push_back(token);
    return all;
  };
  at_every_simd_level([&](const char* level) {
    const auto made_here = tested_backend(2);
    const std::vector<double> expected = answers(*made_here);
    const std::vector<std::string> levels = tested_levels();
    for (const std::string& other : {levels.front(), levels.back()}) {
      const ForcedLevel forced(other);
      tested_backend(1);
      EXPECT_EQ(answers(*made_here), expected) << level;
    }
  });
}

TEST(SimdLevels, AnUnknownOneIsRefused) {
  const ForcedLevel forced("MMX");
  EXPECT_THROW(tested_backend(1), Error);
}

TEST(Backends, AnUnknownOneIsRefusedWithTheNearest) {
  try {
    make_backend("cpi", 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::usage);
    EXPECT_NE(error.expected().find("cpu"), std::string::npos);
  }
}

}  // namespace
}  // namespace kvreplay::testing
