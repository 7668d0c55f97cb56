#include "cpu/elementary_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "attention_reference.h"
#include "random.h"

namespace kvreplay {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
// Four units in the last place.
constexpr double tolerance = 4 * 0x1p-52;

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

TEST(Elementary, GumbelVariatesAreThoseOfTheStandardLibrary) {
  testing::at_every_simd_level([](const char* level) {
    for (const std::size_t n : {1u, 2u, 7u, 8u, 9u, 3000u}) {
      const std::uint64_t before = chain(2, n);
      std::vector<std::int32_t> numbers(n);
      for (std::size_t i = 0; i < n; ++i) numbers[i] = static_cast<std::int32_t>(i % 3 == 2 ? (1 << 30) + i : 2 * i);
      std::vector<double> found(n + 1, 7);
      elementary_kernels().gumbel_variates(before, numbers.data(), static_cast<std::ptrdiff_t>(n), found.data());
      for (std::size_t i = 0; i < n; ++i) {
        const double u = uniform(chained(before, static_cast<std::uint64_t>(numbers[i])));
        const double expected = -std::log(-std::log(u));
        ASSERT_NEAR(found[i], expected, tolerance * (1 + std::abs(expected))) << level << ", u = " << u;
      }
      ASSERT_EQ(found[n], 7) << level << ", n = " << n;
    }
  });
}

}  // namespace
}  // namespace kvreplay
