#include "cpu/elementary_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>
#include <vector>

#include "attention_reference.h"
#include "random.h"

namespace kvreplay {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
// Four units in the last place.
constexpr double tolerance = 4 * 0x1p-52;

TEST(Elementary, LargestOfSomeNumbers) {
  testing::at_every_simd_level([](const char* level) {
    for (const std::size_t n : {0u, 1u, 7u, 16u, 33u, 300u})
      for (std::size_t place = 0; place < n; ++place) {
        std::vector<double> numbers(n, -3);
        numbers[place] = -1;
        const auto count = static_cast<std::ptrdiff_t>(n);
        ASSERT_EQ(elementary_kernels().largest(numbers.data(), count, -infinity), -1) << level << ", n = " << n;
        ASSERT_EQ(elementary_kernels().largest(numbers.data(), count, -0.5), -0.5) << level << ", n = " << n;
      }
    ASSERT_EQ(elementary_kernels().largest(nullptr, 0, -infinity), -infinity) << level;
  });
}

TEST(Elementary, ExponentialsAndTheirSumAreThoseOfTheStandardLibrary) {
  testing::at_every_simd_level([](const char* level) {
    for (const std::size_t n : {1u, 2u, 7u, 8u, 9u, 300u}) {
      std::vector<double> logits(n);
      for (std::size_t i = 0; i < n; ++i) logits[i] = i % 5 == 4 ? -infinity : 3 - 800 * uniform(chain(1, n, i));
      logits[0] = 3;
      std::vector<double> found = logits;
      const double sum = elementary_kernels().exponentials(found.data(), static_cast<std::ptrdiff_t>(n), 3);
      double expected = 0;
      for (std::size_t i = 0; i < n; ++i) {
        const double one = std::exp(logits[i] - 3);
        // Below the normal numbers there are fewer bits.
        ASSERT_NEAR(found[i], one, tolerance * one + 0x1p-1074 * 4) << level << ", exp(" << logits[i] - 3 << ")";
        expected += one;
      }
      ASSERT_NEAR(sum, expected, 1e-14 * expected) << level << ", n = " << n;
    }
  });
}

TEST(Elementary, CountsOfLargerAndOfEqualNumbers) {
  testing::at_every_simd_level([](const char* level) {
    for (const std::size_t n : {0u, 1u, 7u, 8u, 9u, 75u}) {
      std::vector<double> a(n), b(n), counts(n + 1, 2), last(n + 1, -1);
      double equal = 0;
      for (std::size_t i = 0; i < n; ++i) {
        a[i] = static_cast<double>(chain(3, n, i) % 3);
        b[i] = static_cast<double>(chain(4, n, i) % 3);
        equal += a[i] == b[i] ? 1 : 0;
      }
      const auto count = static_cast<std::ptrdiff_t>(n);
      ASSERT_EQ(elementary_kernels().count_equal(a.data(), b.data(), count), equal) << level << ", n = " << n;
      elementary_kernels().count_above(a.data(), count, 1, 40, counts.data(), last.data());
      for (std::size_t i = 0; i < n; ++i) {
        ASSERT_EQ(counts[i], a[i] > 1 ? 3 : 2) << level << ", n = " << n << ", number " << i;
        ASSERT_EQ(last[i], a[i] > 1 ? 40 : -1) << level << ", n = " << n << ", number " << i;
      }
      ASSERT_EQ(counts[n], 2);
      ASSERT_EQ(last[n], -1);
    }
  });
}

/// The chain with mix(chain ^ x) = `mixed` for x = 0: the inverse of mix() in random.h.
std::uint64_t chain_to(std::uint64_t mixed) {
  const auto unshifted = [](std::uint64_t z, int bits) {
    std::uint64_t found = z;
    for (int known = bits; known < 64; known += bits) found = z ^ (found >> bits);
    return found;
  };
  const auto inverse = [](std::uint64_t odd) {
    std::uint64_t found = odd;  // right in 3 bits; each step doubles them
    for (int step = 0; step < 5; ++step) found *= 2 - odd * found;
    return found;
  };
  mixed = unshifted(mixed, 31) * inverse(0x94D049BB133111EBu);
  mixed = unshifted(mixed, 27) * inverse(0xBF58476D1CE4E5B9u);
  return unshifted(mixed, 30) - 0x9E3779B97F4A7C15u;
}

/// G of a uniform number, in units of ln 2. Near 1, where uniform() rounds it, from its exact distance to 1.
double gumbel(std::uint64_t mixed) {
  const double below_one = (0x1p53 - static_cast<double>(mixed >> 11) - 0.5) * 0x1p-53;
  const double log_u = below_one < 0.5 ? std::log1p(-below_one) : std::log(uniform(mixed));
  return -std::log(-log_u) / std::numbers::ln2;
}

TEST(Elementary, GumbelNoiseOfTheSmallestAndLargestUniformNumbers) {
  testing::at_every_simd_level([](const char* level) {
    for (const double bits : {0x0p0, 0x1p53 * 1e-9, 0x1p53 * 0.3, 0x1p52, 0x1p53 - 0x1p23, 0x1p53 - 2, 0x1p53 - 1}) {
      const std::uint64_t mixed = static_cast<std::uint64_t>(bits) << 11, before = chain_to(mixed);
      ASSERT_EQ(chained(before, 0), mixed);
      const std::int32_t number = 0;
      float found = 0;
      elementary_kernels().add_gumbel_noise(before, &number, 1, 1, &found);
      ASSERT_NEAR(found, gumbel(mixed), 3e-7 * (1 + std::abs(gumbel(mixed)))) << level << ", u = " << uniform(mixed);
    }
  });
}

TEST(Elementary, GumbelNoiseIsThatOfTheStandardLibrary) {
  testing::at_every_simd_level([](const char* level) {
    for (const std::size_t n : {1u, 2u, 7u, 8u, 9u, 3000u})
      for (const float tau : {1.0F, 2.5F}) {
        const std::uint64_t before = chain(2, n);
        std::vector<std::int32_t> numbers(n);
        std::vector<float> found(n + 1, 7);
        for (std::size_t i = 0; i < n; ++i) {
          numbers[i] = static_cast<std::int32_t>(i % 3 == 2 ? (1 << 30) + i : 2 * i);
          found[i] = static_cast<float>(i % 50);
        }
        elementary_kernels().add_gumbel_noise(before, numbers.data(), static_cast<std::ptrdiff_t>(n), tau,
                                              found.data());
        for (std::size_t i = 0; i < n; ++i) {
          const double noise = gumbel(chained(before, static_cast<std::uint64_t>(numbers[i])));
          const double expected = (static_cast<double>(i % 50) + noise) / tau;
          ASSERT_NEAR(found[i], expected, 5e-7 * (1 + std::abs(expected))) << level << ", number " << numbers[i];
        }
        ASSERT_EQ(found[n], 7) << level << ", n = " << n;
      }
  });
}

}  // namespace
}  // namespace kvreplay
