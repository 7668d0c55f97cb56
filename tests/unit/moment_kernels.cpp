#include "cpu/moment_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "attention_reference.h"
#include "cpu/aligned_buffer.h"
#include "random.h"

namespace kvreplay::testing {
namespace {

constexpr int chunk_keys = MomentKernels::chunk_keys;
constexpr int chunk_words = MomentKernels::chunk_words;

/// Masks of nothing, everything, single keys at both ends of a word, and random ones.
std::vector<std::vector<std::uint64_t>> some_masks() {
  std::vector<std::vector<std::uint64_t>> masks{std::vector<std::uint64_t>(chunk_words, 0),
                                                std::vector<std::uint64_t>(chunk_words, ~std::uint64_t{0})};
  for (const int key : {0, 63, 64, 300, chunk_keys - 1}) {
    masks.push_back(masks.front());
    masks.back()[static_cast<std::size_t>(key / 64)] = std::uint64_t{1} << (key % 64);
  }
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<std::uint64_t> random;
    for (int w = 0; w < chunk_words; ++w)
      random.push_back(chain(seed, w) & (seed % 2 == 0 ? chain(seed, w, 1) : ~std::uint64_t{0}));
    masks.push_back(random);
  }
  return masks;
}

bool has(const std::vector<std::uint64_t>& mask, int key) {
  return (mask[static_cast<std::size_t>(key / 64)] >> (key % 64) & 1) != 0;
}

/// Between 0 and 1; NaN would be found where a key that is not in a mask counts.
void fill(float* numbers, std::size_t count, std::uint64_t seed) {
  for (std::size_t i = 0; i < count; ++i) numbers[i] = static_cast<float>(uniform(chain(seed, i)));
}

TEST(MomentKernels, SumTheNumbersUnderAMask) {
  const int levels = at_every_simd_level([](const char* level) {
    SCOPED_TRACE(level);
    AlignedBuffer<float> buffer;
    float* numbers = buffer.at_least(chunk_keys);
    fill(numbers, chunk_keys, 1);
    const auto masks = some_masks();
    std::vector<const std::uint64_t*> pointers;
    for (const auto& mask : masks) pointers.push_back(mask.data());
    std::vector<MaskedSums> sums(masks.size(), {1.0, 2.0});
    moment_kernels().add_masked_sums(numbers, pointers.data(), static_cast<int>(masks.size()), sums.data());
    for (std::size_t i = 0; i < masks.size(); ++i) {
      MaskedSums expected{1.0, 2.0};
      for (int key = 0; key < chunk_keys; ++key) {
        const double number = has(masks[i], key) ? static_cast<double>(numbers[key]) : 0.0;
        expected.sum += number;
        expected.square += number * number;
      }
      EXPECT_NEAR(sums[i].sum, expected.sum, 1e-6 * expected.sum) << i;
      EXPECT_NEAR(sums[i].square, expected.square, 1e-6 * expected.square) << i;
    }
  });
  EXPECT_GE(levels, 1);
}

TEST(MomentKernels, WhatAMaskLeavesOutIsNotLookedAt) {
  at_every_simd_level([](const char* level) {
    SCOPED_TRACE(level);
    AlignedBuffer<float> buffer, masked_buffer;
    float* numbers = buffer.at_least(chunk_keys);
    float* masked = masked_buffer.at_least(chunk_keys);
    for (const auto& mask : some_masks()) {
      double expected = 0;
      for (int key = 0; key < chunk_keys; ++key) {
        numbers[key] = has(mask, key) ? 1.0F : NAN;
        expected += has(mask, key) ? 1.0 : 0.0;
      }
      const std::uint64_t* pointer = mask.data();
      MaskedSums sums;
      moment_kernels().add_masked_sums(numbers, &pointer, 1, &sums);
      EXPECT_EQ(sums.sum, expected);
      EXPECT_EQ(sums.square, expected);
      moment_kernels().apply_mask(numbers, mask.data(), masked);
      for (int key = 0; key < chunk_keys; ++key) EXPECT_EQ(masked[key], has(mask, key) ? 1.0F : 0.0F);
    }
  });
}

TEST(MomentKernels, GatherAndDot) {
  at_every_simd_level([](const char* level) {
    SCOPED_TRACE(level);
    AlignedBuffer<float> buffer, gathered_buffer;
    float* numbers = buffer.at_least(chunk_keys);
    float* gathered = gathered_buffer.at_least(chunk_keys + 16);
    fill(numbers, chunk_keys, 2);
    for (const auto& mask : some_masks()) {
      std::vector<float> expected;
      for (int key = 0; key < chunk_keys; ++key)
        if (has(mask, key)) expected.push_back(numbers[key]);
      const int count = moment_kernels().gather(numbers, mask.data(), gathered);
      ASSERT_EQ(count, static_cast<int>(expected.size()));
      double dot = 0;
      for (int i = 0; i < count; ++i) {
        EXPECT_EQ(gathered[i], expected[static_cast<std::size_t>(i)]) << i;
        dot += static_cast<double>(gathered[i]) * static_cast<double>(numbers[i]);
      }
      for (int i = count; i < chunk_keys + 16; ++i) gathered[i] = NAN;
      EXPECT_NEAR(moment_kernels().dot(gathered, numbers, count), dot, 1e-6 * dot);
    }
  });
}

TEST(MomentKernels, WeightedValuesOfSomeKeys) {
  at_every_simd_level([](const char* level) {
    SCOPED_TRACE(level);
    const MomentKernels& kernels = moment_kernels();
    const int dim = 2 * kernels.columns;
    AlignedBuffer<float> weights_buffer, values_buffer;
    AlignedBuffer<double> out_buffer;
    float* weights = weights_buffer.at_least(product(kernels.rows, MomentKernels::row_stride));
    float* values = values_buffer.at_least(product(chunk_keys, dim));
    double* out = out_buffer.at_least(product(kernels.rows, dim));
    fill(weights, product(kernels.rows, MomentKernels::row_stride), 3);
    fill(values, product(chunk_keys, dim), 4);
    for (const auto& mask : some_masks()) {
      std::vector<std::int32_t> keys;
      for (int key = 0; key < chunk_keys; ++key)
        if (has(mask, key)) keys.push_back(key);
      std::fill_n(out, product(kernels.rows, dim), 1.0);
      kernels.add_weighted_values(weights, values, keys.data(), static_cast<int>(keys.size()), dim, out);
      for (int row = 0; row < kernels.rows; ++row) {
        for (int c = 0; c < dim; ++c) {
          double expected = 1.0;
          for (const std::int32_t key : keys)
            expected += static_cast<double>(weights[row * MomentKernels::row_stride + key]) *
                        static_cast<double>(values[key * dim + c]);
          EXPECT_NEAR(out[row * dim + c], expected, 4e-6 * expected) << row << ", " << c;
        }
      }
    }
  });
}

}  // namespace
}  // namespace kvreplay::testing
