#include <gtest/gtest.h>

#include "attention_reference.h"
#include "cpu/cpu_backend.h"

namespace kvreplay::testing {
namespace {

std::vector<std::int32_t> choose(const LayerTensors& layer, const RedundancyElimination& what, int threads = 2) {
  return tested_backend(threads)->least_redundant(layer, what);
}

std::vector<std::int32_t> reference(const RandomLayer& layer, const RedundancyElimination& what) {
  std::vector<std::vector<std::vector<std::int64_t>>> similarities;
  for (const bool of_keys : {true, false}) {
    if (!(of_keys ? what.keys : what.values)) continue;
    std::vector<std::vector<double>> vectors;
    for (std::size_t slot = 0; slot < what.resident.size(); ++slot) {
      const int position = what.resident[slot];
      vectors.emplace_back();
      for (int head = 0; head < layer.shape().kv_heads; ++head) {
        std::vector<double> part = (of_keys ? layer.k : layer.v).row(head, position);
        if (of_keys && what.positions == Positions::cache)
          part = layer.rotated(part, static_cast<int>(slot) - position);
        vectors.back().insert(vectors.back().end(), part.begin(), part.end());
      }
    }
    similarities.push_back(reference_similarities(vectors));
  }
  return reference_least_redundant(similarities, what);
}

class LeastRedundantOf : public ::testing::TestWithParam<LayerShape> {};

TEST_P(LeastRedundantOf, IsThatOfTheDefinition) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  std::vector<std::int32_t> resident;
  for (int token = 0; token < shape.tokens; ++token)
    if (uniform(chain(3, token)) < 0.7 || token == 0) resident.push_back(token);
  const int tokens = static_cast<int>(resident.size());
  struct Protection {
    int sinks, recent, keep;
  };
  for (const auto [sinks, recent, keep] :
       {Protection{0, 1, tokens / 2}, {4, tokens / 4, tokens / 2 + 3}, {0, 1, tokens}, {2, 0, 9}, {1, 5, 6}}) {
    for (const bool most : {false, true}) {
      for (const auto& [keys, values] : {std::pair{true, true}, {true, false}, {false, true}}) {
        for (const Positions positions : {Positions::original, Positions::cache}) {
          const RedundancyElimination what{.resident = resident,
                                           .positions = positions,
                                           .keys = keys,
                                           .values = values,
                                           .most_redundant = most,
                                           .sinks = sinks,
                                           .recent = recent,
                                           .keep = keep};
          const std::vector<std::int32_t> found = choose(layer.tensors(), what, 1);
          EXPECT_EQ(found, reference(layer, what)) << "keep " << keep << ", most " << most << ", keys " << keys
                                                   << ", values " << values << ", " << static_cast<int>(positions);
          EXPECT_EQ(choose(layer.tensors(), what, 2), found);
          EXPECT_EQ(choose(layer.tensors(), what, 3), found);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, LeastRedundantOf,
    ::testing::Values(LayerShape{.tokens = 50, .dim = 8, .rope_pairs = 4},
                      LayerShape{.query_heads = 9, .kv_heads = 3, .tokens = 131, .dim = 33, .rope_pairs = 5},
                      LayerShape{.query_heads = 3, .kv_heads = 1, .tokens = 90, .dim = 2, .rope_pairs = 1},
                      LayerShape{
                          .tokens = 97, .dim = 12, .dtype = DType::float16, .rope_pairs = 6, .interleaved = true},
                      LayerShape{.kv_heads = 4, .tokens = 70, .dim = 64, .dtype = DType::bfloat16}));

TEST(LeastRedundant, EverySimdLevelChoosesTheSame) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    // 260 numbers a token are more than are multiplied at a time.
    for (const int dim : {20, 130}) {
      const RandomLayer layer({.kv_heads = 2, .tokens = 203, .dim = dim, .dtype = dtype, .rope_pairs = dim / 2});
      const auto resident = range(20, 203);
      for (const Positions positions : {Positions::original, Positions::cache}) {
        const RedundancyElimination what{.resident = resident, .positions = positions, .recent = 5, .keep = 90};
        const std::vector<std::int32_t> expected = reference(layer, what);
        EXPECT_GE(at_every_simd_level([&](const char* level) {
                    EXPECT_EQ(choose(layer.tensors(), what, 1), expected) << level;
                    EXPECT_EQ(choose(layer.tensors(), what, 3), expected) << level;
                  }),
                  1);
      }
    }
  }
}

TEST(LeastRedundant, RowsThatAreNotHeldAreComputedAgainWithTheSameBits) {
  // Clustered tokens raise one another's red_i, some of which are more than there is room for at once.
  RandomLayer layer({.kv_heads = 2, .tokens = 301, .dim = 33, .rope_pairs = 9});
  for (int token = 0; token < 301; ++token)
    for (int head = 0; head < 2; ++head)
      for (int c = 0; c < 33; ++c) {
        const double centre = gaussian(chain(7, token % 2, head, c), chain(8, token % 2, head, c));
        layer.k.set(head, token, c, static_cast<float>(centre + 0.05 * layer.k.at(head, token, c)));
      }
  const auto resident = range(0, 301);
  for (const Positions positions : {Positions::original, Positions::cache}) {
    for (const bool most : {false, true}) {
      const RedundancyElimination what{
          .resident = resident, .positions = positions, .most_redundant = most, .recent = 2, .keep = 150};
      const std::vector<std::int32_t> expected = reference(layer, what);
      EXPECT_GE(at_every_simd_level([&](const char* level) {
                  for (const std::size_t bytes : {std::size_t{0}, std::size_t{300000}})
                    EXPECT_EQ(CpuBackend(2, bytes).least_redundant(layer.tensors(), what), expected) << level;
                }),
                1);
    }
  }
}

TEST(LeastRedundant, BuffersThatWereLargerOrSmallerBeforeDoNotMatter) {
  const RandomLayer layer({.kv_heads = 2, .tokens = 300, .dim = 20});
  CpuBackend backend(2);
  for (const int tokens : {100, 300, 13, 120}) {
    const auto resident = range(0, tokens);
    const RedundancyElimination what{.resident = resident, .keep = tokens / 2};
    EXPECT_EQ(backend.least_redundant(layer.tensors(), what), reference(layer, what)) << tokens;
  }
}

TEST(LeastRedundant, SimilaritiesOfTheCallBeforeAreReadForTheSameVectorsAlone) {
  const LayerShape shape{.kv_heads = 2, .tokens = 120, .dim = 20, .rope_pairs = 4};
  const RandomLayer layer(shape);
  RandomLayer changed(shape);
  for (int token = 50; token < 70; ++token) changed.v.set(1, token, 3, 9.0F);
  const auto all = range(0, 100), others = range(20, 120);
  CpuBackend backend(2);
  const auto expect_reference = [&](const RandomLayer& of, const RedundancyElimination& what, const char* call) {
    EXPECT_EQ(backend.least_redundant(of.tensors(), what), reference(of, what)) << call;
  };
  expect_reference(layer, {.resident = all, .keep = 30}, "first");
  expect_reference(layer, {.resident = all, .keep = 60}, "another budget");
  expect_reference(changed, {.resident = all, .keep = 60}, "other values");
  expect_reference(changed, {.resident = all, .keys = false, .keep = 60}, "values in the place of keys");
  expect_reference(layer, {.resident = others, .keep = 60}, "other tokens");
  expect_reference(layer, {.resident = others, .positions = Positions::cache, .keep = 60}, "other positions");
  expect_reference(layer, {.resident = others, .positions = Positions::cache, .keep = 40}, "the same positions");
}

/// (1,0), (1,0), (0,1), (1,1), (-1,0), with the last protected: first 0 (of Add -1, -1, 0, -0.7071), then 2 (of 3, 2,
/// 2.7071), then 1 (of 2 against 2.1213).
TEST(LeastRedundant, ChoosesAsByHand) {
  const std::vector<float> keys{1, 0, 1, 0, 0, 1, 1, 1, -1, 0};
  const TensorView view{reinterpret_cast<const std::byte*>(keys.data()), DType::float32, 1, 5, 2};
  LayerTensors layer;
  layer.q = layer.k = layer.v = view;
  const auto resident = range(0, 5);
  RedundancyElimination what{.resident = resident, .values = false, .keep = 1};
  const std::vector<std::vector<std::int32_t>> expected{{4}, {0, 4}, {0, 2, 4}, {0, 1, 2, 4}, {0, 1, 2, 3, 4}};
  for (what.keep = 1; what.keep <= 5; ++what.keep)
    EXPECT_EQ(choose(layer, what), expected[static_cast<std::size_t>(what.keep) - 1]);
}

TEST(LeastRedundant, AZeroVectorIsLikeNothing) {
  // Beside (1,0): (0,0) has Add 0, more than (-1,0) and less than (1,1), though it is smaller than either.
  const std::vector<float> keys{0, 0, -1, 0, 1, 1, 1, 0};
  LayerTensors layer;
  layer.q = layer.k = layer.v = {reinterpret_cast<const std::byte*>(keys.data()), DType::float32, 1, 4, 2};
  const auto resident = range(0, 4);
  RedundancyElimination what{.resident = resident, .keep = 2};
  EXPECT_EQ(choose(layer, what), (std::vector<std::int32_t>{1, 3}));
  what.most_redundant = true;
  EXPECT_EQ(choose(layer, what), (std::vector<std::int32_t>{2, 3}));
  const auto without_opposite = std::vector<std::int32_t>{0, 2, 3};
  what = {.resident = without_opposite, .keep = 2};
  EXPECT_EQ(choose(layer, what), (std::vector<std::int32_t>{0, 2}));
}

TEST(LeastRedundant, EqualTokensTieWhereverTheyStandAndTheFirstJoins) {
  // Three kinds of tokens in turn, one of them zero: within a kind the positions decide.
  RandomLayer layer({.kv_heads = 2, .tokens = 200, .dim = 33});
  for (int token = 0; token < 199; ++token)
    for (int head = 0; head < 2; ++head)
      for (int c = 0; c < 33; ++c) {
        const float value = static_cast<float>(uniform(chain(7, token % 3, head, c)) - 0.5);
        layer.k.set(head, token, c, token % 3 == 0 ? 0.0F : value);
        layer.v.set(head, token, c, token % 3 == 0 ? 0.0F : value);
      }
  const auto resident = range(0, 200);
  for (const bool most : {false, true}) {
    const RedundancyElimination what{.resident = resident, .most_redundant = most, .keep = 40};
    const std::vector<std::int32_t> found = choose(layer.tensors(), what);
    EXPECT_EQ(found, reference(layer, what));
    for (const int token : found) {
      const bool others_before = token >= 3 && token < 199;
      EXPECT_TRUE(!others_before || std::find(found.begin(), found.end(), token - 3) != found.end()) << token;
    }
  }
}

TEST(LeastRedundant, MoreTokensThanSimilaritiesAreHeldFor) {
  const RandomLayer layer({.query_heads = 1, .kv_heads = 1, .tokens = 17000, .dim = 3});
  const auto resident = range(0, 17000);
  const RedundancyElimination what{.resident = resident, .values = false, .recent = 3, .keep = 12};
  // The definition once more, with S computed as it is asked for.
  const auto similarity = [&](int i, int j) {
    const std::vector<double> a = layer.k.row(0, i), b = layer.k.row(0, j);
    return reference_similarities({a, b})[0][1];
  };
  std::vector<std::int32_t> members{16997, 16998, 16999};
  while (members.size() < 12) {
    std::vector<std::int64_t> red;
    for (const int i : members) {
      red.push_back(INT64_MIN);
      for (const int k : members)
        if (k != i) red.back() = std::max(red.back(), similarity(i, k));
    }
    int best = -1;
    std::int64_t least = 0;
    for (int j = 0; j < 17000; ++j) {
      if (std::find(members.begin(), members.end(), j) != members.end()) continue;
      std::int64_t sum = 0, highest = INT64_MIN;
      for (std::size_t i = 0; i < members.size(); ++i) {
        const std::int64_t s = similarity(members[i], j);
        sum += std::max<std::int64_t>(0, s - red[i]);
        highest = std::max(highest, s);
      }
      if (best >= 0 && sum + highest >= least) continue;
      best = j;
      least = sum + highest;
    }
    members.push_back(best);
  }
  std::sort(members.begin(), members.end());
  EXPECT_EQ(choose(layer.tensors(), what), members);
}

}  // namespace
}  // namespace kvreplay::testing
