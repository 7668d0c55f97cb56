#include <gtest/gtest.h>

#include "attention_reference.h"

namespace kvreplay::testing {
namespace {

double cosine(const std::vector<double>& a, const std::vector<double>& b) {
  const double size = std::sqrt(std::inner_product(a.begin(), a.end(), a.begin(), 0.0) *
                                std::inner_product(b.begin(), b.end(), b.begin(), 0.0));
  return size > 0.0 ? std::inner_product(a.begin(), a.end(), b.begin(), 0.0) / size : 0.0;
}

TEST(Norms, AreThoseOfBruteForce) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    const RandomTensor tensor(3, 40, 33, dtype, 2.0, 5);
    for (const double p : {1.0, 1.5, 2.0, 3.0}) {
      const Matrix found = tested_backend(2)->norms(tensor.view(), 37, p);
      ASSERT_EQ(found.rows(), 3);
      ASSERT_EQ(found.columns(), 37);
      for (int head = 0; head < 3; ++head) {
        for (int token = 0; token < 37; ++token) {
          double sum = 0.0;
          for (const double x : tensor.row(head, token)) sum += std::pow(std::abs(x), p);
          EXPECT_NEAR(found(head, token), std::pow(sum, 1.0 / p), 1e-12 * sum);
        }
      }
    }
  }
  const RandomTensor tensor(1, 5, 9, DType::float32, 2.0, 5);
  const Matrix found = tested_backend(1)->norms(tensor.view(), 5, HUGE_VAL);
  for (int token = 0; token < 5; ++token) {
    double highest = 0.0;
    for (const double x : tensor.row(0, token)) highest = std::max(highest, std::abs(x));
    EXPECT_EQ(found(0, token), highest);
  }
}

TEST(Norms, AreThoseOfBruteForceAtEverySimdLevel) {
  for (const int dim : {1, 2, 7, 31, 64, 131}) {
    const RandomTensor tensor(2, 3, dim, DType::float32, 2.0, 5);
    EXPECT_GE(
        at_every_simd_level([&](const char* level) {
          for (const double p : {1.0, 2.0, 2.5, HUGE_VAL}) {
            const Matrix found = tested_backend(1)->norms(tensor.view(), 3, p);
            for (int head = 0; head < 2; ++head) {
              for (int token = 0; token < 3; ++token) {
                double sum = 0.0;
                double highest = 0.0;
                for (const double x : tensor.row(head, token)) {
                  sum += std::pow(std::abs(x), p);
                  highest = std::max(highest, std::abs(x));
                }
                EXPECT_NEAR(found(head, token), std::isinf(p) ? highest : std::pow(sum, 1.0 / p), 1e-14 * dim * highest)
                    << level << ", " << dim << " numbers, p = " << p;
              }
            }
          }
        }),
        1);
  }
}

struct SimilarityCase {
  int heads, tokens, dim;
  DType dtype;
  double spread = 2.0;
};

class SimilarityOf : public ::testing::TestWithParam<SimilarityCase> {};

TEST_P(SimilarityOf, RowsHasTheMaximaOfBruteForceAndBitsForAnyThreads) {
  const auto [heads, tokens, dim, dtype, spread] = GetParam();
  const RandomTensor tensor(heads, tokens + 3, dim, dtype, spread, 11);
  std::vector<std::vector<double>> vectors;
  for (int token = 0; token < tokens; ++token) vectors.push_back(token_vector(tensor, heads, token));
  std::vector<double> expected(static_cast<std::size_t>(tokens), tokens == 1 ? 0.0 : -2.0);
  for (std::size_t i = 0; i < expected.size(); ++i)
    for (std::size_t j = 0; j < expected.size(); ++j)
      if (j != i) expected[i] = std::max(expected[i], cosine(vectors[i], vectors[j]));
  EXPECT_GE(at_every_simd_level([&](const char* level) {
              SCOPED_TRACE(level);
              const std::vector<double> found = tested_backend(1)->similarity_row_maxima(tensor.view(), tokens);
              ASSERT_EQ(found.size(), expected.size());
              for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-6) << i;
              EXPECT_EQ(tested_backend(2)->similarity_row_maxima(tensor.view(), tokens), found);
              EXPECT_EQ(tested_backend(3)->similarity_row_maxima(tensor.view(), tokens), found);
            }),
            1);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, SimilarityOf,
    ::testing::Values(SimilarityCase{2, 33, 8, DType::float32}, SimilarityCase{1, 1, 4, DType::float32},
                      SimilarityCase{1, 2, 1, DType::float32}, SimilarityCase{3, 257, 33, DType::float16},
                      SimilarityCase{8, 200, 128, DType::bfloat16},  // longer than one chunk
                      SimilarityCase{8, 130, 256, DType::float32}, SimilarityCase{1, 131, 2, DType::bfloat16},
                      SimilarityCase{3, 97, 33, DType::bfloat16},       // an odd number of numbers
                      SimilarityCase{1, 1009, 5, DType::float16},       // many bands of rows
                      SimilarityCase{2, 40, 33, DType::float32, 1e25},  // squares beyond float32
                      SimilarityCase{2, 40, 33, DType::float32, 1e-25},
                      SimilarityCase{2, 40, 33, DType::bfloat16, 1e25},
                      SimilarityCase{2, 40, 33, DType::bfloat16, 1e-25}));

TEST(Similarity, OfAZeroVectorIsZeroAndOfEqualVectorsOne) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    RandomTensor tensor(2, 100, 9, dtype, 1.0, 3);
    for (int head = 0; head < 2; ++head) {
      for (int c = 0; c < 9; ++c) {
        tensor.set(head, 40, c, 0.0F);
        tensor.set(head, 90, c, static_cast<float>(tensor.at(head, 3, c)));
      }
    }
    EXPECT_GE(at_every_simd_level([&](const char* level) {
                const std::vector<double> found = tested_backend(2)->similarity_row_maxima(tensor.view(), 100);
                EXPECT_EQ(found[40], 0.0) << level;
                EXPECT_NEAR(found[3], 1.0, 1e-6) << level;
                EXPECT_EQ(found[90], found[3]) << level;
              }),
              1);
  }
}

TEST(Similarity, OfEqualVectorsIsEqualWhereverTheyStand) {
  // Three kinds of tokens in turn: the maxima of a kind are all of one cosine, with its own.
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    RandomTensor tensor(1, 300, 37, dtype, 1.0, 3);
    for (int token = 3; token < 300; ++token)
      for (int c = 0; c < 37; ++c) tensor.set(0, token, c, static_cast<float>(tensor.at(0, token % 3, c)));
    EXPECT_GE(at_every_simd_level([&](const char* level) {
                const std::vector<double> found = tested_backend(2)->similarity_row_maxima(tensor.view(), 300);
                for (std::size_t token = 3; token < 300; ++token) EXPECT_EQ(found[token], found[token % 3]) << level;
                const std::vector<double> three = tested_backend(2)->similarity_row_maxima(tensor.view(), 3);
                EXPECT_LT(*std::max_element(three.begin(), three.end()), 0.9);
              }),
              1);
  }
}

TEST(Similarity, OfLongNearlyEqualVectorsStaysWithinAMillionth) {
  // Partial sums grow to 1: the hardest case for float32.
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    RandomTensor tensor(16, 40, 256, dtype, 0.05, 3);
    for (int head = 0; head < 16; ++head)
      for (int token = 0; token < 40; ++token)
        for (int c = 0; c < 256; ++c) tensor.set(head, token, c, static_cast<float>(1.0 + tensor.at(head, token, c)));
    std::vector<double> expected(40, -2.0);
    for (int i = 0; i < 40; ++i)
      for (int j = 0; j < 40; ++j)
        if (j != i) {
          double& highest = expected[static_cast<std::size_t>(i)];
          highest = std::max(highest, cosine(token_vector(tensor, 16, i), token_vector(tensor, 16, j)));
        }
    EXPECT_GE(at_every_simd_level([&](const char* level) {
                const std::vector<double> found = tested_backend(2)->similarity_row_maxima(tensor.view(), 40);
                for (std::size_t i = 0; i < 40; ++i) EXPECT_NEAR(found[i], expected[i], 1e-6) << level;
              }),
              1);
  }
}

TEST(NumbersThatAreNone, AreRefusedByAllThatReadsVectors) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()})
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16})
      for (const int token : {0, 19, 63}) {
        RandomLayer layer({.tokens = 64, .dim = 12, .dtype = dtype});
        layer.k.set(0, token, 3, bad);
        const LayerTensors tensors = layer.tensors();
        const auto all = range(0, 64);
        at_every_simd_level([&](const char* level) {
          SCOPED_TRACE(::testing::Message() << level << " " << name_of(dtype) << " " << bad << " at " << token);
          const auto backend = tested_backend(2);
          EXPECT_THROW(backend->similarity_row_maxima(tensors.k, 64), Error);
          EXPECT_THROW(backend->least_redundant(tensors, {.resident = all, .keep = 20}), Error);
          for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()})
            EXPECT_THROW(backend->norms(tensors.k, 64, p), Error) << p;
        });
      }
}

}  // namespace
}  // namespace kvreplay::testing
