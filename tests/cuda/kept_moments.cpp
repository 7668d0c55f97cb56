#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "tests/unit/attention_reference.h"

namespace kvreplay::testing {
namespace {

std::array<double, 11> members(const Moments& m) {
  return {m.mass,          m.square,     m.prompt_mass,  m.prompt_square, m.nosink_mass,  m.nosink_square,
          m.output_square, m.output_dot, m.error_square, m.logit_square,  m.unaligned_dot};
}

void expect_near(const std::vector<Moments>& found, const std::vector<Moments>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t cell = 0; cell < found.size(); ++cell) {
    const auto these = members(found[cell]), those = members(expected[cell]);
    for (std::size_t i = 0; i < these.size(); ++i)
      EXPECT_NEAR(these[i], those[i], 1e-5 * (1.0 + std::abs(those[i]))) << "cell " << cell << ", number " << i;
  }
}

void expect_near(const KeptMoments& found, const KeptMoments& expected) {
  expect_near(found.full, expected.full);
  expect_near(found.kept, expected.kept);
}

void expect_equal(const std::vector<Moments>& found, const std::vector<Moments>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t cell = 0; cell < found.size(); ++cell)
    EXPECT_EQ(members(found[cell]), members(expected[cell])) << "cell " << cell;
}

using Sets = std::vector<std::vector<KeptSet>>;

std::vector<KeptSets> spans_of(const Sets& sets) { return {sets.begin(), sets.end()}; }

Sets sets_of(const EvalCase& some) {
  const auto& [shape, boundary, queries] = some;
  Sets sets;
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer}) {
    sets.push_back({random_set(heads, shape, boundary, 0.3, 1)});
    sets.push_back(one_a_query(heads, some, 0.4, 8));
    sets.push_back({random_set(heads, shape, shape.tokens, 0.3, 2)});  // nothing later is kept by itself
  }
  sets.push_back({random_set(Heads::kv, shape, boundary, 0.0, 3)});      // a query's own key and the later ones
  sets.push_back({random_set(Heads::kv, shape, shape.tokens, 0.0, 3)});  // its own alone
  sets.push_back({random_set(Heads::query, shape, boundary, 2.0, 4)});   // everything
  sets.push_back(sets[0]);
  return sets;
}

class CudaMoments : public ::testing::TestWithParam<EvalCase> {};

TEST_P(CudaMoments, AreThoseOfTheCpu) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  const Sets sets = sets_of(GetParam());
  const auto moments = [&](const char* backend) {
    return make_backend(backend, 1)->kept_moments(layer.tensors(), queries, boundary, spans_of(sets));
  };
  expect_near(moments("cuda"), moments("cpu"));
}

TEST_P(CudaMoments, OfWhatKeepsEverythingAreThoseOfEverything) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  std::vector<KeptSet> seen;  // by each query, but for its own key
  for (const int t : queries) {
    KeptSet& set = seen.emplace_back(Heads::layer, 1, shape.tokens);
    for (int key = 0; key < t; ++key)
      if (layer.visible(t, key)) set.keep(0, key);
  }
  const Sets sets{{random_set(Heads::query, shape, boundary, 2.0, 4)}, seen};
  const KeptMoments found = make_backend("cuda", 1)->kept_moments(layer.tensors(), queries, boundary, spans_of(sets));
  for (std::size_t i = 0; i < found.kept.size(); ++i) {
    EXPECT_EQ(found.kept[i].mass, shape.sink_logits ? found.full[i % found.full.size()].mass : 1.0);
    EXPECT_EQ(found.kept[i].error_square, 0.0);
    EXPECT_EQ(members(found.kept[i]), members(found.full[i % found.full.size()]));
  }
}

TEST_P(CudaMoments, HaveTheSameBitsInLittleMemoryFromHeldTensorsAndAlone) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  const LayerTensors tensors = layer.tensors();
  const Sets sets = sets_of(GetParam());
  const auto roomy = make_backend("cuda", 1);
  MomentParts parts = all_moments;
  parts.vectors = true;
  const KeptMoments expected = roomy->kept_moments(tensors, queries, boundary, spans_of(sets), parts);
  const auto expect_same = [&](const KeptMoments& found) {
    expect_equal(found.full, expected.full);
    expect_equal(found.kept, expected.kept);
    EXPECT_EQ(found.outputs.full, expected.outputs.full);
    EXPECT_EQ(found.outputs.errors, expected.outputs.errors);
  };
  roomy->hold(tensors, true);
  expect_same(roomy->kept_moments(tensors, queries, boundary, spans_of(sets), parts));
  roomy->let_go(tensors);
  // Some heads and some queries at a time.
  const auto narrow = make_backend("cuda", 1, {.memory = std::size_t{1} << 19});
  expect_same(narrow->kept_moments(tensors, queries, boundary, spans_of(sets), parts));

  const std::vector<std::int32_t> last{queries.back()};
  const KeptMoments alone =
      roomy->kept_moments(tensors, last, boundary, std::vector<KeptSets>{sets[0], {&sets[1].back(), 1}});
  for (std::size_t set = 0; set < 2; ++set) {
    for (int head = 0; head < shape.query_heads; ++head) {
      const std::size_t cell = static_cast<std::size_t>(head + 1) * queries.size() - 1;
      EXPECT_EQ(members(alone.kept[set * static_cast<std::size_t>(shape.query_heads) + static_cast<std::size_t>(head)]),
                members(expected.kept[set * expected.full.size() + cell]));
    }
  }
}

TEST_P(CudaMoments, PartsThatAreAskedForAloneAreThoseOfAllParts) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  const Sets sets = sets_of(GetParam());
  const auto cuda = make_backend("cuda", 1);
  const KeptMoments all = cuda->kept_moments(layer.tensors(), queries, boundary, spans_of(sets));
  EXPECT_TRUE(all.parts.cover(all_moments));
  for (const MomentParts parts :
       {MomentParts{}, MomentParts{.outputs = true}, MomentParts{.logits = true}, MomentParts{.unaligned = true}}) {
    const auto expected = [&](std::vector<Moments> moments) {
      for (Moments& some : moments) {
        if (!parts.outputs) some.output_square = some.output_dot = some.error_square = 0.0;
        if (!parts.logits) some.logit_square = 0.0;
        if (!parts.unaligned) some.unaligned_dot = 0.0;
      }
      return moments;
    };
    const KeptMoments some = cuda->kept_moments(layer.tensors(), queries, boundary, spans_of(sets), parts);
    EXPECT_FALSE(some.parts.cover(all_moments));
    expect_equal(some.full, expected(all.full));
    expect_equal(some.kept, expected(all.kept));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CudaMoments,
    ::testing::Values(
        EvalCase{{.query_heads = 9, .kv_heads = 3, .tokens = 130, .dim = 33}, 110, range(100, 130, 7)},
        EvalCase{
            {.query_heads = 8, .kv_heads = 2, .tokens = 90, .dim = 16, .dtype = DType::float16}, 60, range(50, 90, 9)},
        EvalCase{{.tokens = 75, .dim = 140, .dtype = DType::bfloat16}, 66, range(60, 75, 4)},
        EvalCase{{.tokens = 150, .dim = 66, .dtype = DType::float16, .sliding_window = 40}, 100, range(70, 150, 19)},
        EvalCase{{.tokens = 90, .dim = 8, .spread = 2.0, .softcap = 4.0F}, 70, range(60, 90, 7)},
        EvalCase{{.tokens = 50, .dim = 8}, 3, range(0, 50, 9)},  // a boundary among the sinks
        EvalCase{
            {.query_heads = 2, .kv_heads = 1, .tokens = 80, .dim = 8, .first_stored_query = 65, .stored_query_step = 5},
            70,
            {70, 75}},
        EvalCase{{.query_heads = 6,
                  .kv_heads = 3,
                  .tokens = 80,
                  .dim = 70,
                  .dtype = DType::float16,
                  .chunk = 33,
                  .value_components = 64,
                  .sink_logits = true},
                 60,
                 range(50, 80, 7)},
        EvalCase{{.query_heads = 1, .kv_heads = 1, .tokens = 1, .dim = 1}, 1, {0}}));

TEST(CudaMomentsOf, ASinkLogitFarAboveAllKeysLeavesTheirSharesExact) {
  const LayerShape shape{.query_heads = 2, .kv_heads = 1, .tokens = 80, .dim = 8};
  const RandomLayer layer(shape);
  LayerTensors tensors = layer.tensors();
  const std::vector<double> sinks{60.0, 400.0};
  tensors.sinks = sinks;
  const auto queries = range(60, 80, 5);
  const KeptSet set = random_set(Heads::kv, shape, 60, 0.3, 1);
  const std::vector<KeptSets> sets{KeptSets(&set, 1)};
  const auto moments = [&](const char* backend) {
    return make_backend(backend, 1)->kept_moments(tensors, queries, 60, sets);
  };
  const KeptMoments found = moments("cuda"), expected = moments("cpu");
  for (std::size_t cell = 0; cell < found.full.size(); ++cell) {
    EXPECT_GT(expected.full[cell].mass, 0.0);
    EXPECT_NEAR(found.full[cell].mass / expected.full[cell].mass, 1.0, 1e-5) << cell;
    EXPECT_NEAR(found.kept[cell].mass / expected.kept[cell].mass, 1.0, 1e-5) << cell;
  }
}

TEST(CudaMomentsOf, KeysOfSeveralChunksAndSplitsAreAllCounted) {
  const EvalCase some{
      {.query_heads = 1, .kv_heads = 1, .tokens = 9300, .dim = 4, .first_stored_query = 9290}, 9000, {9290, 9299}};
  const RandomLayer layer(some.shape);
  Sets sets{{random_set(Heads::kv, some.shape, some.boundary, 0.5, 1)}, {KeptSet(Heads::kv, 1, some.boundary)}};
  sets.back().front().keep(0, 8300);  // in the last split alone
  const auto moments = [&](const char* backend) {
    return make_backend(backend, 1)->kept_moments(layer.tensors(), some.queries, some.boundary, spans_of(sets));
  };
  expect_near(moments("cuda"), moments("cpu"));
}

TEST(CudaMomentsOf, MoreSetsThanABlockHasAreThoseOfEach) {
  const EvalCase some{{.query_heads = 2, .kv_heads = 1, .tokens = 70, .dim = 4}, 60, {65, 69}};
  const RandomLayer layer(some.shape);
  Sets sets;
  for (std::uint64_t seed = 0; seed < 130; ++seed)
    sets.push_back({random_set(Heads::query, some.shape, some.boundary, 0.4, seed)});
  const auto moments = [&](const char* backend) {
    return make_backend(backend, 1)->kept_moments(layer.tensors(), some.queries, some.boundary, spans_of(sets));
  };
  expect_near(moments("cuda"), moments("cpu"));
}

TEST(CudaMomentsOf, SetsOfOneKeyFarBelowTheLargestLogitHaveTheirOutputAndTheirShare) {
  // Beside logits of 0 the first token's is 20, 48, 68 or 2,000.
  const EvalCase some{{.query_heads = 2, .kv_heads = 1, .tokens = 40, .dim = 4}, 30, {30, 39}};
  for (const float gap : {20.0F, 48.0F, 68.0F, 2000.0F}) {
    SCOPED_TRACE(gap);
    RandomLayer layer(some.shape);
    for (int token = 0; token < 40; ++token) {
      for (int head = 0; head < 2; ++head) layer.q.set(head, token, 0, 2.0F);
      layer.k.set(0, token, 0, token == 0 ? gap : token >= 30 ? -gap : 0.0F);
    }
    Sets sets;
    for (const int key : {5, 29}) {
      sets.push_back({KeptSet(Heads::kv, 1, 40)});
      sets.back().front().keep(0, key);
    }
    sets.push_back({random_set(Heads::kv, some.shape, 30, 2.0, 1)});
    const KeptMoments found =
        make_backend("cuda", 1)->kept_moments(layer.tensors(), some.queries, some.boundary, spans_of(sets));
    std::size_t i = 0;
    for (const std::vector<KeptSet>& set : sets) {
      for (int head = 0; head < 2; ++head) {
        for (const int t : some.queries) {
          const Moments expected = reference_moments(layer, head, t, some.boundary, &set.front());
          const Moments& moments = found.kept[i++];
          expect_near(std::vector{moments}, std::vector{expected});
          EXPECT_GT(expected.output_square, 1e-3);
          if (gap > 100.0F) continue;  // the share is beyond float64
          // A float32 logit of 100 is known to 2^-17.
          EXPECT_NEAR(moments.nosink_mass / expected.nosink_mass, 1.0, 1e-4);
          EXPECT_NEAR(moments.nosink_square / expected.nosink_square, 1.0, 1e-4);
          EXPECT_NEAR(moments.prompt_square / expected.prompt_square, 1.0, 1e-4);
        }
      }
    }
  }
}

TEST(CudaMomentsOf, ValuesMayBeOfAnotherTypeAndSizeThanKeys) {
  const EvalCase some{{.tokens = 60, .dim = 20, .dtype = DType::bfloat16}, 50, range(40, 60, 6)};
  const RandomLayer layer(some.shape);
  const RandomTensor other(some.shape.kv_heads, some.shape.tokens, 70, DType::float32, 1.0, 7);
  LayerTensors tensors = layer.tensors();
  tensors.v = other.view();
  const Sets sets = sets_of(some);
  const auto moments = [&](const char* backend) {
    return make_backend(backend, 1)->kept_moments(tensors, some.queries, some.boundary, spans_of(sets));
  };
  expect_near(moments("cuda"), moments("cpu"));
}

TEST(CudaMomentsOf, NoQueriesAreNone) {
  const RandomLayer layer({.tokens = 20});
  EXPECT_TRUE(make_backend("cuda", 1)->kept_moments(layer.tensors(), {}, 10, {}).full.empty());
}

TEST(CudaMomentsOf, LogitsThatAreNotFiniteAreRefused) {
  RandomLayer layer({.tokens = 40});
  layer.k.set(1, 7, 0, HUGE_VALF);
  const auto queries = range(30, 40, 3);
  try {
    make_backend("cuda", 1)->kept_moments(layer.tensors(), queries, 30, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::input);
  }
  EXPECT_THROW(make_backend("cuda", 1)->kept_moments(RandomLayer({.tokens = 40, .first_stored_query = 35}).tensors(),
                                                     queries, 30, {}),
               Error);
}

}  // namespace
}  // namespace kvreplay::testing
