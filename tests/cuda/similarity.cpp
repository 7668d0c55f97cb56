#include <gtest/gtest.h>

#include "emulated_device.h"
#include "tests/unit/attention_reference.h"

namespace kvreplay::testing {
namespace {

constexpr emulated::Order orders[] = {emulated::forward, emulated::backward, emulated::shuffled(1)};

/// max_{j != i} cos(w_i, w_j) in float64.
std::vector<double> reference_maxima(const RandomTensor& tensor, int heads, int tokens) {
  std::vector<std::vector<double>> vectors;
  std::vector<double> lengths;
  const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  };
  for (int token = 0; token < tokens; ++token) {
    vectors.push_back(token_vector(tensor, heads, token));
    lengths.push_back(std::sqrt(dot(vectors.back(), vectors.back())));
  }
  std::vector<double> maxima(vectors.size(), tokens == 1 ? 0.0 : -2.0);
  for (std::size_t i = 0; i < vectors.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) {
      const double size = lengths[i] * lengths[j];
      const double cosine = size > 0.0 ? dot(vectors[i], vectors[j]) / size : 0.0;
      maxima[i] = std::max(maxima[i], cosine);
      maxima[j] = std::max(maxima[j], cosine);
    }
  return maxima;
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected, double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found[i], expected[i], tolerance) << i;
}

/// On devices with either way to multiply numbers of 16 bits: products of warps, of warp groups.
class CudaSimilarity : public ::testing::TestWithParam<int> {
 protected:
  CudaSimilarity() {
    emulated::reset();
    emulated::set_capability(GetParam(), 0);
  }
  ~CudaSimilarity() override { emulated::set_order(emulated::forward); }
};
INSTANTIATE_TEST_SUITE_P(Capability, CudaSimilarity, ::testing::Values(8, 9));

TEST_P(CudaSimilarity, HasTheMaximaOfBruteForceInAnyOrder) {
  struct Shape {
    int heads, tokens, dim;
    DType dtype;
    double spread = 2.0;
  };
  for (const auto& [heads, tokens, dim, dtype, spread] :
       {Shape{2, 33, 8, DType::float32}, Shape{1, 1, 4, DType::float32}, Shape{1, 2, 1, DType::bfloat16},
        Shape{3, 257, 33, DType::float16}, Shape{8, 200, 128, DType::bfloat16}, Shape{4, 130, 256, DType::float32},
        Shape{3, 150, 65, DType::bfloat16}, Shape{2, 40, 33, DType::float32, 1e25},
        Shape{2, 40, 33, DType::float32, 1e-25}, Shape{2, 40, 33, DType::bfloat16, 1e25},
        Shape{2, 40, 33, DType::bfloat16, 1e-25}, Shape{2, 40, 33, DType::float16, 1e4},
        Shape{2, 40, 33, DType::float16, 2e-4}}) {
    SCOPED_TRACE(::testing::Message() << heads << " heads of " << tokens << " x " << dim << ", " << name_of(dtype)
                                      << ", spread " << spread);
    const RandomTensor tensor(heads, tokens + 3, dim, dtype, spread, 11);
    const std::vector<double> expected = reference_maxima(tensor, heads, tokens);
    std::vector<double> first;
    for (const emulated::Order& order : orders) {
      emulated::set_order(order);
      const std::vector<double> found = make_backend("cuda", 1)->similarity_row_maxima(tensor.view(), tokens);
      expect_near(found, expected, 1e-6);
      if (first.empty()) first = found;
      EXPECT_EQ(found, first);
    }
  }
}

TEST_P(CudaSimilarity, OfManyTokensIsFoundByManyBlocks) {
  // More columns than one block visits.
  const RandomTensor tensor(1, 2200, 3, DType::bfloat16, 1.0, 5);
  expect_near(make_backend("cuda", 1)->similarity_row_maxima(tensor.view(), 2200), reference_maxima(tensor, 1, 2200),
              1e-6);
}

TEST_P(CudaSimilarity, HasTheSameBitsWhereTokensComeInSpans) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    const RandomTensor tensor(2, 420, 40, dtype, 1.0, 7);
    const std::vector<double> expected = make_backend("cuda", 1)->similarity_row_maxima(tensor.view(), 420);
    emulated::reset();
    emulated::set_capability(GetParam(), 0);
    const std::size_t limit = 400000;  // the shortest spans: an eighth is less than what two would need
    EXPECT_EQ(make_backend("cuda", 2, {.memory = limit})->similarity_row_maxima(tensor.view(), 420), expected);
    EXPECT_LE(emulated::peak_allocated(), limit);
  }
}

TEST_P(CudaSimilarity, OfAHeldTensorIsTheSame) {
  const RandomLayer layer({.kv_heads = 2, .tokens = 140, .dim = 24, .dtype = DType::bfloat16});
  const LayerTensors tensors = layer.tensors();
  const auto backend = make_backend("cuda", 1);
  const std::vector<double> expected = backend->similarity_row_maxima(tensors.k, 131);
  backend->hold(tensors, false);
  EXPECT_EQ(backend->similarity_row_maxima(tensors.k, 131), expected);
  backend->let_go(tensors);
  EXPECT_EQ(backend->similarity_row_maxima(tensors.k, 131), expected);
}

TEST_P(CudaSimilarity, OfEqualVectorsIsEqualWhereverTheyStand) {
  // Three kinds of tokens in turn: the maxima of a kind are all of one cosine, with its own.
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    RandomTensor tensor(2, 300, 70, dtype, 1.0, 3);
    for (int head = 0; head < 2; ++head)
      for (int token = 3; token < 300; ++token)
        for (int c = 0; c < 70; ++c) tensor.set(head, token, c, static_cast<float>(tensor.at(head, token % 3, c)));
    const std::vector<double> found = make_backend("cuda", 1)->similarity_row_maxima(tensor.view(), 300);
    for (std::size_t token = 0; token < 300; ++token) EXPECT_EQ(found[token], found[token % 3]);
    EXPECT_NEAR(found[0], 1.0, 1e-6);
  }
}

TEST_P(CudaSimilarity, OfAZeroVectorIsZero) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    // All others point away from one another, as far as they can: zero is their highest.
    RandomTensor tensor(1, 3, 2, dtype, 1.0, 3);
    const float x[] = {1.0F, 0.0F, -1.0F};
    for (int token = 0; token < 3; ++token) {
      tensor.set(0, token, 0, x[token]);
      tensor.set(0, token, 1, 0.0F);
    }
    EXPECT_EQ(make_backend("cuda", 1)->similarity_row_maxima(tensor.view(), 3), (std::vector<double>{0.0, 0.0, 0.0}));
    const RandomTensor away = [&] {
      tensor.set(0, 1, 0, -2.0F);
      return tensor;
    }();
    expect_near(make_backend("cuda", 1)->similarity_row_maxima(away.view(), 2), {-1.0, -1.0}, 1e-6);
  }
}

TEST_P(CudaSimilarity, OfLongNearlyEqualVectorsStaysWithinAMillionth) {
  // Partial sums grow to 1: the hardest case for float32.
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    RandomTensor tensor(16, 40, 256, dtype, 0.05, 3);
    for (int head = 0; head < 16; ++head)
      for (int token = 0; token < 40; ++token)
        for (int c = 0; c < 256; ++c) tensor.set(head, token, c, static_cast<float>(1.0 + tensor.at(head, token, c)));
    expect_near(make_backend("cuda", 1)->similarity_row_maxima(tensor.view(), 40), reference_maxima(tensor, 16, 40),
                1e-6);
  }
}

TEST_P(CudaSimilarity, OfNumbersThatAreNoneIsRefused) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
      RandomTensor tensor(2, 70, 12, dtype, 1.0, 3);
      tensor.set(1, 63, 3, bad);
      const auto backend = make_backend("cuda", 1);
      EXPECT_THROW(backend->similarity_row_maxima(tensor.view(), 70), Error);
      EXPECT_NO_THROW(backend->similarity_row_maxima(tensor.view(), 63));
      for (const double p : {1.0, 2.0, 3.0, HUGE_VAL}) {
        EXPECT_THROW(backend->norms(tensor.view(), 70, p), Error) << p;
        EXPECT_NO_THROW(backend->norms(tensor.view(), 63, p)) << p;
      }
    }
}

TEST(CudaNorms, AreThoseOfBruteForce) {
  emulated::reset();
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    for (const int dim : {1, 33, 130}) {
      const RandomTensor tensor(3, 40, dim, dtype, 2.0, 5);
      // All heads at once, and one after the other.
      for (const std::size_t limit : {std::size_t{0}, std::size_t{1} << 16}) {
        const auto backend = make_backend("cuda", 2, {.memory = limit});
        for (const double p : {1.0, 1.5, 2.0, 3.0, HUGE_VAL}) {
          const Matrix found = backend->norms(tensor.view(), 37, p);
          ASSERT_EQ(found.rows(), 3);
          ASSERT_EQ(found.columns(), 37);
          for (int head = 0; head < 3; ++head) {
            for (int token = 0; token < 37; ++token) {
              double sum = 0.0, highest = 0.0;
              for (const double x : tensor.row(head, token)) {
                sum += std::pow(std::abs(x), p);
                highest = std::max(highest, std::abs(x));
              }
              const double expected = std::isinf(p) ? highest : std::pow(sum, 1.0 / p);
              EXPECT_NEAR(found(head, token), expected, 1e-14 * dim * highest) << p;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvreplay::testing
