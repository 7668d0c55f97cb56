#include <gtest/gtest.h>

#include <memory>
#include <tuple>
#include <utility>

#include "tests/unit/attention_reference.h"

namespace kvreplay::testing {
namespace {

auto numbers(const Comparison& c) {
  const auto three = [](const Alignment& a) { return std::vector{a.dot, a.full_square, a.stored_square}; };
  std::vector<double> all;
  for (const Alignment& alignment : {c.all, c.prompt, c.nosink, c.logits})
    for (const double x : three(alignment)) all.push_back(x);
  for (const double x :
       {c.l1, c.mass, c.full_mass, c.output_full_square, c.output_square, c.output_dot, c.error_square})
    all.push_back(x);
  return all;
}

std::vector<double> numbers(const std::vector<Comparison>& comparisons) {
  std::vector<double> all;
  for (const Comparison& comparison : comparisons)
    for (const double x : numbers(comparison)) all.push_back(x);
  return all;
}

void expect_near(const std::vector<Comparison>& found, const std::vector<Comparison>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t cell = 0; cell < found.size(); ++cell) {
    const std::vector<double> these = numbers(found[cell]), those = numbers(expected[cell]);
    for (std::size_t i = 0; i < these.size(); ++i)
      EXPECT_NEAR(these[i], those[i], 1e-11 * (1.0 + std::abs(those[i]))) << "cell " << cell << ", number " << i;
  }
}

std::vector<std::vector<KeptSet>> sets_of(const EvalCase& some) {
  std::vector<std::vector<KeptSet>> all;
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer}) {
    all.push_back({random_set(heads, some.shape, some.boundary, 0.3, 7)});
    all.push_back(one_a_query(heads, some, 0.3, 8));
  }
  all.push_back(one_a_query(Heads::kv, some, 0.0, 8));
  return all;
}

class CudaComparison : public ::testing::TestWithParam<EvalCase> {};

TEST_P(CudaComparison, IsThatOfTheCpu) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  LayerShape other = shape;
  other.seed = 9;
  other.dtype = DType::float32;
  const RandomLayer stored(other);
  const auto cpu = make_backend("cpu", 1), cuda = make_backend("cuda", 1);
  const std::vector<std::vector<KeptSet>> all_sets = sets_of(GetParam());
  for (std::size_t number = 0; number < all_sets.size(); ++number) {
    for (const Positions positions : {Positions::original, Positions::cache}) {
      for (const RandomLayer* store : {&layer, &stored}) {
        SCOPED_TRACE(::testing::Message() << "sets " << number << (store == &layer ? "" : ", other keys and values")
                                          << (positions == Positions::cache ? ", moved" : ""));
        const auto compare = [&](Backend& backend) {
          return backend.compare_attention(layer.tensors(), store->tensors(), positions, queries, boundary,
                                           all_sets[number]);
        };
        expect_near(compare(*cuda), compare(*cpu));
      }
    }
  }
}

TEST_P(CudaComparison, HasTheSameBitsInLittleMemoryAndFromHeldTensors) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  const auto roomy = make_backend("cuda", 1), narrow = make_backend("cuda", 1, {.memory = std::size_t{1} << 19});
  for (const Heads heads : {Heads::kv, Heads::query}) {
    const std::vector<KeptSet> sets = one_a_query(heads, GetParam(), 0.3, 8);
    const auto compare = [&](Backend& backend) {
      return numbers(
          backend.compare_attention(layer.tensors(), layer.tensors(), Positions::cache, queries, boundary, sets));
    };
    const std::vector<double> expected = compare(*roomy);
    EXPECT_EQ(compare(*narrow), expected);
    roomy->hold(layer.tensors(), true);
    EXPECT_EQ(compare(*roomy), expected);
    roomy->let_go(layer.tensors());
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CudaComparison,
    ::testing::Values(
        EvalCase{{.query_heads = 4, .kv_heads = 2, .tokens = 80, .dim = 8, .rope_pairs = 3}, 60, range(50, 80, 6)},
        EvalCase{{.query_heads = 9, .kv_heads = 3, .tokens = 233, .dim = 33, .rope_pairs = 16, .interleaved = true},
                 200,
                 range(190, 233, 5)},
        EvalCase{{.query_heads = 5, .kv_heads = 1, .tokens = 101, .dim = 12, .dtype = DType::float16, .rope_pairs = 6},
                 77,
                 range(0, 101, 20)},
        EvalCase{{.tokens = 150, .dim = 66, .dtype = DType::bfloat16, .sliding_window = 40, .rope_pairs = 33},
                 100,
                 range(70, 150, 19)},
        EvalCase{{.tokens = 90, .dim = 8, .spread = 2.0, .softcap = 4.0F, .rope_pairs = 4}, 70, range(60, 90, 7)},
        EvalCase{{.query_heads = 36, .kv_heads = 1, .tokens = 40, .dim = 3, .rope_pairs = 1}, 2, range(0, 40, 19)},
        EvalCase{{.query_heads = 6,
                  .kv_heads = 3,
                  .tokens = 80,
                  .dim = 70,
                  .dtype = DType::float16,
                  .rope_pairs = 3,
                  .rope_offset = 64,
                  .chunk = 33,
                  .value_components = 64,
                  .sink_logits = true},
                 60,
                 range(50, 80, 7)},
        EvalCase{{.query_heads = 1, .kv_heads = 1, .tokens = 1, .dim = 1}, 1, {0}}));

TEST(CudaComparisonWith, KeysThatTakeSeveralBlocksAreAllCounted) {
  const EvalCase some{
      {.query_heads = 1, .kv_heads = 1, .tokens = 2100, .dim = 4, .first_stored_query = 2050, .rope_pairs = 2},
      1500,
      {2060, 2099}};
  const RandomLayer layer(some.shape);
  const std::vector<KeptSet> sets{random_set(Heads::kv, some.shape, 1500, 0.3, 7)};
  const auto compare = [&](const char* backend) {
    return make_backend(backend, 1)
        ->compare_attention(layer.tensors(), layer.tensors(), Positions::cache, some.queries, some.boundary, sets);
  };
  expect_near(compare("cuda"), compare("cpu"));
}

TEST(CudaComparisonWith, OneHeadOfHeldTensorsIsThatHeadOfTheLayer) {
  const LayerShape shape{.query_heads = 6, .kv_heads = 3, .tokens = 50, .dim = 8};
  const RandomLayer layer(shape);
  const std::vector<KeptSet> sets{random_set(Heads::layer, shape, 40, 0.3, 7)};
  const std::vector<std::int32_t> queries{44};
  const auto cuda = make_backend("cuda", 1);
  const auto compare = [&](const LayerTensors& tensors) {
    return cuda->compare_attention(tensors, tensors, Positions::original, queries, 40, sets);
  };
  const std::vector<Comparison> expected = compare(layer.tensors());
  cuda->hold(layer.tensors(), true);
  for (int head = 0; head < shape.query_heads; ++head) {
    LayerTensors one = layer.tensors();
    for (auto [tensor, number] : {std::pair{&one.q, head}, {&one.k, head / 2}, {&one.v, head / 2}}) {
      tensor->data = tensor->row(number, 0);
      tensor->heads = 1;
    }
    EXPECT_EQ(numbers(compare(one)), numbers({expected[static_cast<std::size_t>(head)]})) << head;
  }
  cuda->let_go(layer.tensors());
}

TEST(CudaComparisonWith, QueriesThatAreNotStoredAreRefused) {
  const RandomLayer layer({.tokens = 60, .first_stored_query = 20});
  const std::vector<KeptSet> sets{random_set(Heads::kv, layer.shape(), 40, 0.3, 7)};
  const std::vector<std::int32_t> queries{10};
  EXPECT_THROW(make_backend("cuda", 1)->compare_attention(layer.tensors(), layer.tensors(), Positions::original,
                                                          queries, 40, sets),
               Error);
}

}  // namespace
}  // namespace kvreplay::testing
