#include "cpu/comparison_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "attention_reference.h"
#include "cpu/aligned_buffer.h"
#include "cpu/tile.h"
#include "random.h"

namespace kvreplay::testing {
namespace {

constexpr int width = 50;
const std::vector<std::int32_t> some_columns{0, 1, 4, 9, 10, 11, 30, 48}, all_columns = [] {
  std::vector<std::int32_t> all;
  for (int column = 0; column < width; ++column) all.push_back(column);
  return all;
}();

/// Numbers of very different sizes: another order of the sums gives other bits. Some are -infinity.
double* fill(AlignedBuffer<double>& buffer, std::size_t count, std::uint64_t tag) {
  double* numbers = buffer.at_least(count);
  for (std::size_t i = 0; i < count; ++i)
    numbers[i] =
        uniform(chain(tag, i, 1)) < 0.2 ? -HUGE_VAL : (uniform(chain(tag, i)) - 0.5) * (i % 3 == 0 ? 1e4 : 1.0);
  return numbers;
}

double without_infinity(double x) { return x == -HUGE_VAL ? 0.0 : x; }

/// check(kernels, rows, columns, full, stored) at every SIMD level; full(row, column) and stored(row, j) are the
/// numbers behind the pointers of the same names.
using Numbers = std::function<double(int row, int column)>;
void with_matrices(
    const std::function<void(const std::vector<std::int32_t>& columns, int rows, const double* full,
                             const Numbers& full_at, const double* stored, const Numbers& stored_at)>& check) {
  EXPECT_GE(at_every_simd_level([&](const char* level) {
              SCOPED_TRACE(level);
              const int rows = tile_kernels().wide_keys;
              for (const auto& columns : {some_columns, all_columns, {}}) {
                AlignedBuffer<double> full_buffer, stored_buffer;
                const double* full = fill(full_buffer, product(width, rows), 1);
                const double* stored = fill(stored_buffer, product(width, rows), 2);
                const auto numbers_of = [rows](const double* matrix) {
                  return [=](int row, int column) {
                    return matrix[product(column, rows) + static_cast<std::size_t>(row)];
                  };
                };
                check(columns, rows, full, numbers_of(full), stored, numbers_of(stored));
              }
            }),
            1);
}

TEST(ComparisonKernels, SoftmaxIsThatOfTheStandardLibraryWithTheSameBitsAtEveryLevel) {
  std::vector<double> of_first_level;
  at_every_simd_level([&](const char* level) {
    constexpr int columns = 3000;
    const int rows = tile_kernels().wide_keys;
    AlignedBuffer<double> buffer;
    double* numbers = buffer.at_least(product(columns, rows));
    const auto logit = [](int row, int column) {
      const double spread = row % 2 == 0 ? 3.0 : 450.0;  // beyond 347 below the highest weights count as 0
      return column % 7 == 6 ? -HUGE_VAL : 5 - spread * uniform(chain(3, row % 4, column));
    };
    for (int column = 0; column < columns; ++column)
      for (int row = 0; row < rows; ++row)
        numbers[product(column, rows) + static_cast<std::size_t>(row)] = logit(row, column);
    std::vector<double> highest(static_cast<std::size_t>(rows), -HUGE_VAL), sum(highest.size(), 0.25);
    comparison_kernels().raise_highest(numbers, columns, highest.data());
    comparison_kernels().softmax(numbers, columns, highest.data(), sum.data());
    for (int row = 0; row < rows; ++row) {
      double most = -HUGE_VAL, total = 0.25;
      for (int column = 0; column < columns; ++column) most = std::max(most, logit(row, column));
      ASSERT_EQ(highest[static_cast<std::size_t>(row)], most);
      const auto weight = [&](int column) {
        const double power = std::exp(logit(row, column) - most);
        return power < 0x1p-500 ? 0.0 : power;
      };
      for (int column = 0; column < columns; ++column) total += weight(column);
      int zeros = 0;
      for (int column = 0; column < columns; ++column) {
        const double expected = weight(column) / total;
        const double found = numbers[product(column, rows) + static_cast<std::size_t>(row)];
        ASSERT_NEAR(found, expected, 4 * 0x1p-52 * expected) << level << ", " << logit(row, column) - most;
        zeros += found == 0 ? 1 : 0;
      }
      ASSERT_EQ(zeros > columns / 7, row % 2 == 1) << "weights that do not count";
    }
    const std::vector<double> first_rows = {numbers, numbers + rows};
    if (of_first_level.empty()) of_first_level = first_rows;
    for (std::size_t i = 0; i < std::min(first_rows.size(), of_first_level.size()); ++i)
      ASSERT_EQ(first_rows[i], of_first_level[i]) << level;
  });
}

TEST(ComparisonKernels, SoftmaxOfWhatIsNoNumberIsNone) {
  at_every_simd_level([](const char* level) {
    const int rows = tile_kernels().wide_keys;
    AlignedBuffer<double> buffer;
    double* numbers = buffer.at_least(product(2, rows));
    std::fill_n(numbers, product(2, rows), 0.0);
    numbers[0] = std::numeric_limits<double>::quiet_NaN();
    std::vector<double> highest(static_cast<std::size_t>(rows), -1.0), sum(highest.size());
    comparison_kernels().raise_highest(numbers, 2, highest.data());
    EXPECT_EQ(highest, std::vector<double>(static_cast<std::size_t>(rows)));
    comparison_kernels().softmax(numbers, 2, highest.data(), sum.data());
    EXPECT_TRUE(std::isnan(numbers[0]) && std::isnan(numbers[rows])) << level;
    for (int row = 1; row < rows; ++row) EXPECT_EQ(numbers[row], 0.5) << level;
  });
}

TEST(ComparisonKernels, AlignColumnsInTheirOrder) {
  with_matrices([](const auto& columns, int rows, const double* full, const Numbers& full_at, const double* stored,
                   const Numbers& stored_at) {
    const int count = static_cast<int>(columns.size());
    for (const int begin : {0, std::min(2, count)}) {
      std::vector<double> dot(static_cast<std::size_t>(rows), 3.0), square(dot.size(), 5.0);
      comparison_kernels().align(full, columns.data(), stored, begin, count, dot.data(), square.data());
      for (int row = 0; row < rows; ++row) {
        double expected_dot = 3.0, expected_square = 5.0;
        for (int j = begin; j < count; ++j) {
          const double x = without_infinity(full_at(row, columns[static_cast<std::size_t>(j)]));
          const double y = without_infinity(stored_at(row, j));
          expected_dot += x * y;
          expected_square += y * y;
        }
        EXPECT_EQ(dot[static_cast<std::size_t>(row)], expected_dot);
        EXPECT_EQ(square[static_cast<std::size_t>(row)], expected_square);
      }
    }
  });
}

TEST(ComparisonKernels, AddTheFullNumbersOfHeldColumns) {
  with_matrices([](const auto& columns, int rows, const double* full, const Numbers& full_at, const double* stored,
                   const Numbers& stored_at) {
    const int count = static_cast<int>(columns.size());
    std::vector<double> mass(static_cast<std::size_t>(rows), 7.0);
    comparison_kernels().add_held(full, columns.data(), stored, count, mass.data());
    for (int row = 0; row < rows; ++row) {
      double expected = 7.0;
      for (int j = 0; j < count; ++j)
        if (stored_at(row, j) != -HUGE_VAL) expected += full_at(row, columns[static_cast<std::size_t>(j)]);
      EXPECT_EQ(mass[static_cast<std::size_t>(row)], expected);
    }
  });
}

TEST(ComparisonKernels, AddDistancesOfAllColumns) {
  with_matrices([](const auto& columns, int rows, const double* full, const Numbers& full_at, const double* stored,
                   const Numbers& stored_at) {
    const int count = static_cast<int>(columns.size());
    std::vector<double> distance(static_cast<std::size_t>(rows), 2.0);
    comparison_kernels().add_distances(full, width, columns.data(), stored, count, distance.data());
    for (int row = 0; row < rows; ++row) {
      double expected = 2.0;
      for (int column = 0; column < width; ++column) {
        const auto found = std::ranges::find(columns, column);
        expected +=
            std::abs(full_at(row, column) -
                     (found == columns.end() ? 0.0 : stored_at(row, static_cast<int>(found - columns.begin()))));
      }
      if (std::isnan(expected))  // infinities of both
        EXPECT_TRUE(std::isnan(distance[static_cast<std::size_t>(row)]));
      else
        EXPECT_EQ(distance[static_cast<std::size_t>(row)], expected);
    }
  });
}

TEST(ComparisonKernels, ShowWhatIsNotANumber) {
  at_every_simd_level([](const char* level) {
    const int rows = tile_kernels().wide_keys;
    AlignedBuffer<double> buffer;
    double* numbers = buffer.at_least(static_cast<std::size_t>(rows));
    std::fill_n(numbers, rows, NAN);
    std::vector<double> dot(static_cast<std::size_t>(rows)), square = dot, mass = dot;
    comparison_kernels().align(numbers, all_columns.data(), numbers, 0, 1, dot.data(), square.data());
    comparison_kernels().add_held(numbers, all_columns.data(), numbers, 1, mass.data());
    for (const auto& sums : {dot, square, mass})
      EXPECT_TRUE(std::ranges::all_of(sums, [](double sum) { return std::isnan(sum); })) << level;
  });
}

}  // namespace
}  // namespace kvreplay::testing
