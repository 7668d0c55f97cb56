// Conversions of stored floats, against arithmetic that knows nothing of bits.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "float_types.h"
#include "random.h"

namespace kvreplay {
namespace {

/// sign, exponent and mantissa of a 16-bit float as a number; subnormals included, no NaN or infinity.
double value_of(std::uint16_t bits, int mantissa_bits, int bias) {
  const int exponent = (bits & 0x7FFF) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
  const double size = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                    : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return (bits & 0x8000) != 0 ? -size : size;
}

TEST(FloatTypes, EveryFloat16IsExactAndComesBack) {
  for (int b = 0; b < 0x10000; ++b) {
    const auto bits = static_cast<std::uint16_t>(b);
    const float number = from_float16(bits);
    if ((b & 0x7C00) == 0x7C00) {
      EXPECT_EQ(std::isnan(number), (b & 0x3FF) != 0) << b;
      EXPECT_EQ(std::isinf(number), (b & 0x3FF) == 0) << b;
      continue;
    }
    ASSERT_EQ(number, value_of(bits, 10, 15)) << b;
    ASSERT_EQ(to_float16(number), bits) << b;
  }
}

TEST(FloatTypes, EveryBfloat16IsExactAndComesBack) {
  for (int b = 0; b < 0x10000; ++b) {
    const auto bits = static_cast<std::uint16_t>(b);
    const float number = from_bfloat16(bits);
    if ((b & 0x7F80) == 0x7F80) continue;
    ASSERT_EQ(number, value_of(bits, 7, 127)) << b;
    ASSERT_EQ(to_bfloat16(number), bits) << b;
  }
}

/// The nearest of two neighbours, ties to the even one.
void expect_nearest(float number, std::uint16_t found, double below, double above, std::uint16_t lower_bits) {
  const double to_below = number - below, to_above = above - number;
  const bool lower = to_below < to_above || (to_below == to_above && lower_bits % 2 == 0);
  EXPECT_EQ(found, lower ? lower_bits : lower_bits + 1) << number;
}

TEST(FloatTypes, RoundsToTheNearestAndTiesToEven) {
  for (std::uint64_t i = 0; i < 20000; ++i) {
    const auto half = static_cast<std::uint16_t>(chain(i) % 0x7BFF),
               brain = static_cast<std::uint16_t>(chain(i, 1) % 0x7F7F);
    for (const double part : {0.0, 0.25, 0.5, 0.75, uniform(chain(i, 2))}) {
      const double half_below = value_of(half, 10, 15),
                   half_above = value_of(static_cast<std::uint16_t>(half + 1), 10, 15);
      const float between = static_cast<float>(half_below + part * (half_above - half_below));
      expect_nearest(between, to_float16(between), half_below, half_above, half);
      const double brain_below = value_of(brain, 7, 127),
                   brain_above = value_of(static_cast<std::uint16_t>(brain + 1), 7, 127);
      const float number = static_cast<float>(brain_below + part * (brain_above - brain_below));
      expect_nearest(number, to_bfloat16(number), brain_below, brain_above, brain);
    }
  }
}

TEST(FloatTypes, WhatIsTooLargeBecomesInfinity) {
  EXPECT_EQ(to_float16(65504.0F), 0x7BFF);
  EXPECT_EQ(to_float16(65519.0F), 0x7BFF);
  EXPECT_EQ(to_float16(65520.0F), 0x7C00);
  EXPECT_EQ(to_float16(-1e10F), 0xFC00);
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_TRUE(std::isnan(from_float16(to_float16(std::nanf("")))));
  EXPECT_TRUE(std::isnan(from_bfloat16(to_bfloat16(std::nanf("")))));
}

}  // namespace
}  // namespace kvreplay
