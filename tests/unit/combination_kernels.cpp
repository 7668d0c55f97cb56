#include "cpu/combination_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention_reference.h"
#include "random.h"

namespace kvreplay {
namespace {

/// Random numbers of very different sizes: another order of the sums gives other bits.
template <class Number>
std::vector<Number> numbers(std::size_t count, std::uint64_t tag) {
  std::vector<Number> values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<Number>((uniform(chain(tag, i)) - 0.5) * (i % 3 == 0 ? 1e4 : 1.0));
  return values;
}

template <class Number, class Combine, class Term>
void expect_sums_in_order(Combine combine, const char* level, Term term) {
  for (const int n : {1, 3, 16, 31, 64, 129, 200})
    for (const int count : {1, 2, 7, 64}) {
      const int stride = n + 5;
      const auto weights = numbers<Number>(static_cast<std::size_t>(count), 1);
      const auto rows = numbers<Number>(static_cast<std::size_t>(count * stride), 2);
      std::vector<Number> found(static_cast<std::size_t>(n));
      combine(weights.data(), count, rows.data(), stride, n, found.data());
      for (int i = 0; i < n; ++i) {
        Number sum = 0;
        for (int c = 0; c < count; ++c)
          sum += term(weights[static_cast<std::size_t>(c)], rows[static_cast<std::size_t>(c * stride + i)]);
        ASSERT_EQ(found[static_cast<std::size_t>(i)], sum) << level << ", n = " << n << ", " << count << " rows";
      }
    }
}

TEST(Combinations, AreSumsInOrderAtEverySimdLevel) {
  EXPECT_GE(testing::at_every_simd_level([](const char* level) {
              const auto product = [](auto weight, auto x) { return weight * x; };
              expect_sums_in_order<double>(combination_kernels().doubles, level, product);
              expect_sums_in_order<float>(combination_kernels().floats, level, product);
            }),
            1);
}

TEST(Combinations, TheNearestColumnIsTheFirstOfTheNearest) {
  testing::at_every_simd_level([](const char* level) {
    for (const std::size_t n : {1u, 3u, 16u, 31u, 64u, 129u, 200u})
      for (const std::size_t count : {1u, 7u, 32u}) {
        const auto vector = numbers<double>(count, 3);
        auto rows = numbers<double>(count * n, 4);
        const auto nearest = [&] {
          return combination_kernels().nearest_column(vector.data(), static_cast<int>(count), rows.data(),
                                                      static_cast<std::ptrdiff_t>(n), static_cast<int>(n));
        };
        std::vector<double> distances(n);
        for (std::size_t c = 0; c < count; ++c)
          for (std::size_t i = 0; i < n; ++i)
            distances[i] += (vector[c] - rows[c * n + i]) * (vector[c] - rows[c * n + i]);
        ASSERT_EQ(nearest(), std::ranges::min_element(distances) - distances.begin()) << level << ", n = " << n;
        for (const std::size_t first : {n - 1, n / 2, n / 3}) {  // where the vector itself is, there and behind
          for (std::size_t c = 0; c < count; ++c)
            for (std::size_t i = first; i < n; ++i) rows[c * n + i] = vector[c];
          ASSERT_EQ(nearest(), static_cast<int>(first)) << level << ", n = " << n;
        }
      }
  });
}

TEST(Combinations, AMultipleIsAddedToEachSum) {
  testing::at_every_simd_level([](const char* level) {
    for (const std::size_t n : {0u, 1u, 7u, 8u, 9u, 64u, 100u}) {
      const auto row = numbers<double>(n, 7);
      std::vector<double> first = numbers<double>(n + 1, 8), second = numbers<double>(n + 1, 9);
      const std::vector<double> before = first, also_before = second;
      double* const sums[] = {second.data(), first.data()};
      combination_kernels().add_to_each(0.3, row.data(), static_cast<int>(n), sums, 2);
      for (std::size_t i = 0; i <= n; ++i) {
        const double added = i < n ? 0.3 * row[i] : 0.0;
        ASSERT_EQ(first[i], before[i] + added) << level << ", n = " << n << ", number " << i;
        ASSERT_EQ(second[i], also_before[i] + added) << level << ", n = " << n << ", number " << i;
      }
    }
  });
}

TEST(Combinations, InnerProductsAreEightSums) {
  testing::at_every_simd_level([](const char* level) {
    for (const int n : {0, 1, 7, 8, 9, 64, 100})
      for (const int count : {0, 1, 3, 4, 9}) {
        const auto a = numbers<double>(static_cast<std::size_t>(n), 5);
        const auto rows = numbers<double>(static_cast<std::size_t>(n * count), 6);
        std::vector<double> found(static_cast<std::size_t>(count) + 1, 1e300), expected = found;
        combination_kernels().inner_products(a.data(), rows.data(), count, n, found.data());
        for (std::size_t row = 0; row < static_cast<std::size_t>(count); ++row) {
          double sums[8] = {};
          for (std::size_t c = 0; c < a.size(); ++c) sums[c % 8] += a[c] * rows[row * a.size() + c];
          expected[row] = 0;
          for (const double one : sums) expected[row] += one;
        }
        ASSERT_EQ(found, expected) << level << ", n = " << n << ", rows = " << count;
      }
  });
}

TEST(Combinations, OfSeveralListsAreThoseOfEach) {
  testing::at_every_simd_level([](const char* level) {
    const CombinationKernels& kernels = combination_kernels();
    for (const int n : {1, 15, 16, 31, 100})
      for (const int lists : {1, 3, 4, 6, 9}) {
        constexpr int count = 7, between = 2;  // numbers between the sums of two lists
        const auto weights = numbers<double>(static_cast<std::size_t>(lists * count), 3);
        const auto rows = numbers<double>(static_cast<std::size_t>(count * n), 4);
        std::vector<double> found(static_cast<std::size_t>(lists * (n + between)), 1e300);
        std::vector<double> alone(static_cast<std::size_t>(n));
        kernels.lists_of_doubles(weights.data(), lists, count, rows.data(), n, n, found.data(), n + between);
        for (int list = 0; list < lists; ++list) {
          kernels.doubles(weights.data() + list * count, count, rows.data(), n, n, alone.data());
          for (int i = 0; i < n; ++i)
            ASSERT_EQ(found[static_cast<std::size_t>(list * (n + between) + i)], alone[static_cast<std::size_t>(i)])
                << level << ", list " << list << " of " << lists << ", n = " << n;
          for (int i = n; i < n + between; ++i)
            ASSERT_EQ(found[static_cast<std::size_t>(list * (n + between) + i)], 1e300) << "nothing is written between";
        }
      }
  });
}

}  // namespace
}  // namespace kvreplay
