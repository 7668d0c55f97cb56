#include <gtest/gtest.h>

#include "emulated_device.h"
#include "tests/unit/attention_reference.h"

namespace kvreplay::testing {
namespace {

std::vector<std::int32_t> choose(const char* backend, const LayerTensors& layer, const RedundancyElimination& what,
                                 std::size_t memory = 0) {
  return make_backend(backend, 2, {.memory = memory})->least_redundant(layer, what);
}

class CudaLeastRedundant : public ::testing::Test {
 protected:
  CudaLeastRedundant() { emulated::reset(); }
};

class CudaLeastRedundantOf : public ::testing::TestWithParam<LayerShape> {
 protected:
  CudaLeastRedundantOf() { emulated::reset(); }
};

TEST_P(CudaLeastRedundantOf, IsThatOfTheCpu) {
  const LayerShape& shape = GetParam();
  const RandomLayer layer(shape);
  std::vector<std::int32_t> resident;
  for (int token = 0; token < shape.tokens; ++token)
    if (uniform(chain(3, token)) < 0.7 || token == 0) resident.push_back(token);
  const int tokens = static_cast<int>(resident.size());
  struct Protection {
    int sinks, recent, keep;
  };
  for (const auto& [sinks, recent, keep] :
       {Protection{0, 1, tokens / 2}, {4, tokens / 4, tokens / 2 + 3}, {0, 1, tokens}, {2, 0, 9}})
    for (const bool most : {false, true})
      for (const auto& [keys, values] : {std::pair{true, true}, {true, false}, {false, true}})
        for (const Positions positions : {Positions::original, Positions::cache}) {
          if (!keys && positions == Positions::cache) continue;
          const RedundancyElimination what{.resident = resident,
                                           .positions = positions,
                                           .keys = keys,
                                           .values = values,
                                           .most_redundant = most,
                                           .sinks = sinks,
                                           .recent = recent,
                                           .keep = keep};
          EXPECT_EQ(choose("cuda", layer.tensors(), what), choose("cpu", layer.tensors(), what))
              << "keep " << keep << ", most " << most << ", keys " << keys << ", values " << values << ", "
              << static_cast<int>(positions);
          EXPECT_GT(emulated::peak_allocated(), 0U);
        }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, CudaLeastRedundantOf,
    ::testing::Values(LayerShape{.tokens = 50, .dim = 8, .rope_pairs = 4},
                      LayerShape{.query_heads = 9, .kv_heads = 3, .tokens = 131, .dim = 33, .rope_pairs = 5},
                      LayerShape{.query_heads = 3, .kv_heads = 1, .tokens = 90, .dim = 2, .rope_pairs = 1},
                      LayerShape{
                          .tokens = 97, .dim = 12, .dtype = DType::float16, .rope_pairs = 6, .interleaved = true},
                      LayerShape{.kv_heads = 4, .tokens = 70, .dim = 64, .dtype = DType::bfloat16}));

TEST_F(CudaLeastRedundant, ClustersRaiseOneAnother) {
  // Tokens near one of three centres, some of them equal or zero: many members' red rise at once, and of equal Adds the
  // lower token counts.
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    RandomLayer layer({.kv_heads = 2, .tokens = 300, .dim = 20, .dtype = dtype, .rope_pairs = 4});
    for (int token = 0; token < 300; ++token)
      for (int head = 0; head < 2; ++head)
        for (int c = 0; c < 20; ++c) {
          const double centre = gaussian(chain(7, token % 3, head, c), chain(8, token % 3, head, c));
          const double away = token % 5 == 0 ? 0.0 : 0.05 * layer.k.at(head, token, c);
          layer.k.set(head, token, c, token % 41 == 17 ? 0.0F : static_cast<float>(centre + away));
          if (token % 5 == 0) layer.v.set(head, token, c, token % 41 == 17 ? 0.0F : static_cast<float>(centre));
        }
    const auto resident = range(0, 300);
    for (const Positions positions : {Positions::original, Positions::cache})
      for (const bool most : {false, true}) {
        // More steps than one launch takes.
        const RedundancyElimination what{
            .resident = resident, .positions = positions, .most_redundant = most, .sinks = 1, .recent = 2, .keep = 280};
        const std::vector<std::int32_t> expected = choose("cpu", layer.tensors(), what);
        EXPECT_EQ(choose("cuda", layer.tensors(), what), expected) << name_of(dtype) << ", most " << most;
        if (most || positions == Positions::cache) continue;
        for (const emulated::Order& order : {emulated::backward, emulated::shuffled(1)}) {
          emulated::set_order(order);
          EXPECT_EQ(choose("cuda", layer.tensors(), what), expected) << name_of(dtype);
        }
        emulated::set_order(emulated::forward);
      }
  }
}

TEST_F(CudaLeastRedundant, ThreadsWithSeveralTokensChooseTheSame) {
  // A block has 1024 threads, each of which takes some tokens at once and then the next.
  const RandomLayer layer({.query_heads = 1, .kv_heads = 1, .tokens = 4300, .dim = 3});
  const auto resident = range(0, 4300);
  const RedundancyElimination what{.resident = resident, .keys = false, .recent = 1, .keep = 24};
  EXPECT_EQ(choose("cuda", layer.tensors(), what), choose("cpu", layer.tensors(), what));
}

TEST_F(CudaLeastRedundant, OfAHeldLayerIsTheSame) {
  const RandomLayer layer({.kv_heads = 2, .tokens = 120, .dim = 24, .dtype = DType::bfloat16});
  const LayerTensors tensors = layer.tensors();
  const auto resident = range(20, 115, 2);
  const RedundancyElimination what{.resident = resident, .recent = 3, .keep = 25};
  const auto backend = make_backend("cuda", 1);
  backend->hold(tensors, false);
  EXPECT_EQ(backend->least_redundant(tensors, what), choose("cpu", tensors, what));
  backend->let_go(tensors);
}

TEST_F(CudaLeastRedundant, GoesToTheHostWhereMemoryIsShort) {
  const RandomLayer layer({.kv_heads = 2, .tokens = 600, .dim = 8});
  const auto resident = range(0, 600);
  for (const auto& [keys, values] : {std::pair{true, true}, {false, true}}) {
    const RedundancyElimination what{.resident = resident, .keys = keys, .values = values, .recent = 3, .keep = 50};
    const std::vector<std::int32_t> expected = choose("cpu", layer.tensors(), what);
    // 1.5 MB of similarities a matrix: a quarter of this is room for one of them.
    emulated::reset();
    EXPECT_EQ(choose("cuda", layer.tensors(), what, std::size_t{10} << 20), expected);
    EXPECT_EQ(emulated::peak_allocated() > (std::size_t{1} << 20), !keys);  // a backend asks the device a question
    EXPECT_LE(emulated::peak_allocated(), std::size_t{10} << 20);
  }
}

TEST_F(CudaLeastRedundant, OfNumbersThatAreNoneIsRefused) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()})
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16})
      for (const int token : {0, 63}) {
        RandomLayer layer({.tokens = 64, .dim = 12, .dtype = dtype, .rope_pairs = 6});
        layer.k.set(0, token, 3, bad);
        const auto all = range(0, 64);
        for (const Positions positions : {Positions::original, Positions::cache}) {
          const RedundancyElimination what{.resident = all, .positions = positions, .recent = 1, .keep = 20};
          EXPECT_THROW(choose("cuda", layer.tensors(), what), Error);
          RedundancyElimination of_values = what;
          of_values.keys = false;
          EXPECT_NO_THROW(choose("cuda", layer.tensors(), of_values));
        }
      }
}

}  // namespace
}  // namespace kvreplay::testing
