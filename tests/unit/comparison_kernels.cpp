#include "cpu/comparison_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
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

/// Where the sums that a kernel writes go; each has a number that it must write over.
struct Sums {
  explicit Sums(int rows) : dot(static_cast<std::size_t>(rows), 3.0), square(dot) {}
  AlignmentSums sums() { return {dot.data(), square.data()}; }
  std::vector<double> dot, square;
};

/// Logits -> weights in place, as the full attention is compared with itself.
void softmax(double* numbers, int columns, const std::vector<double>& highest, std::vector<double> sum) {
  const int rows = static_cast<int>(sum.size());
  std::vector<std::int32_t> all(static_cast<std::size_t>(columns));
  std::iota(all.begin(), all.end(), 0);
  comparison_kernels().exponentials(numbers, columns, highest.data(), numbers, sum.data());
  Sums nosink(rows), prompt(rows), whole(rows);
  std::vector<double> distance(sum.size(), 3.0);
  comparison_kernels().compare_weights(numbers, columns, {.number = all.data(), .count = columns}, numbers, sum.data(),
                                       {nosink.sums(), prompt.sums(), whole.sums(), distance.data()});
  EXPECT_EQ(prompt.square, std::vector<double>(sum.size()));
  for (std::size_t row = 0; row < sum.size(); ++row) {
    if (std::isnan(sum[row])) continue;
    EXPECT_EQ(distance[row], 0.0);
    EXPECT_EQ(whole.dot[row], whole.square[row]);
  }
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
    softmax(numbers, columns, highest, sum);
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
    softmax(numbers, 2, highest, sum);
    EXPECT_TRUE(std::isnan(numbers[0]) && std::isnan(numbers[rows])) << level;
    for (int row = 1; row < rows; ++row) EXPECT_EQ(numbers[row], 0.5) << level;
  });
}

/// Columns as a block has them: two of the first tokens, five below the boundary, as far as there are any.
StoredColumns some_of(const std::vector<std::int32_t>& numbers) {
  const int count = static_cast<int>(numbers.size());
  return {.number = numbers.data(), .count = count, .sinks = std::min(2, count), .prompt = std::min(5, count)};
}

TEST(ComparisonKernels, LogitsAreComparedColumnByColumn) {
  with_matrices([](const auto& columns, int rows, const double* full, const Numbers& full_at, const double* stored,
                   const Numbers& stored_at) {
    const StoredColumns of_stored = some_of(columns);
    const double* weights = stored;  // any numbers of another matrix
    const Numbers& weight_at = stored_at;
    Sums logits(rows);
    std::vector<double> mass(static_cast<std::size_t>(rows), 7.0);
    comparison_kernels().compare_logits(full, weights, of_stored, stored, logits.sums(), mass.data());
    for (int row = 0; row < rows; ++row) {
      double dot = 0, square = 0, expected_mass = 0;
      for (int j = 0; j < of_stored.count; ++j) {
        const int column = columns[static_cast<std::size_t>(j)];
        if (stored_at(row, j) != -HUGE_VAL) expected_mass += weight_at(row, column);
        if (j >= of_stored.prompt) continue;
        const double x = without_infinity(full_at(row, column)), y = without_infinity(stored_at(row, j));
        dot += x * y;
        square += y * y;
      }
      EXPECT_EQ(logits.dot[static_cast<std::size_t>(row)], dot);
      EXPECT_EQ(logits.square[static_cast<std::size_t>(row)], square);
      EXPECT_EQ(mass[static_cast<std::size_t>(row)], expected_mass);
    }
  });
}

TEST(ComparisonKernels, WeightsAreComparedColumnByColumn) {
  with_matrices([](const auto& columns, int rows, const double* full, const Numbers& full_at, const double* stored,
                   const Numbers& stored_at) {
    const StoredColumns of_stored = some_of(columns);
    AlignedBuffer<double> full_buffer, buffer;
    double* attention = full_buffer.at_least(product(width, rows));
    double* weights = buffer.at_least(product(width, rows));
    std::transform(full, full + product(width, rows), attention, without_infinity);
    std::transform(stored, stored + product(width, rows), weights, without_infinity);
    std::vector<double> sum(static_cast<std::size_t>(rows));
    for (std::size_t row = 0; row < sum.size(); ++row) sum[row] = 1.5 + static_cast<double>(row);
    Sums nosink(rows), prompt(rows), all(rows);
    std::vector<double> distance(sum.size(), 3.0);
    comparison_kernels().compare_weights(attention, width, of_stored, weights, sum.data(),
                                         {nosink.sums(), prompt.sums(), all.sums(), distance.data()});
    for (int row = 0; row < rows; ++row) {
      const auto r = static_cast<std::size_t>(row);
      const auto sums_of = [&](int begin, int end) {
        std::pair<double, double> dot_and_square;
        for (int j = begin; j < end; ++j) {
          const double x = without_infinity(full_at(row, columns[static_cast<std::size_t>(j)]));
          const double y = without_infinity(stored_at(row, j)) / sum[r];
          EXPECT_EQ(weights[product(j, rows) + r], y);
          dot_and_square.first += x * y;
          dot_and_square.second += y * y;
        }
        return dot_and_square;
      };
      EXPECT_EQ(std::pair(nosink.dot[r], nosink.square[r]), sums_of(of_stored.sinks, of_stored.prompt));
      EXPECT_EQ(std::pair(prompt.dot[r], prompt.square[r]), sums_of(0, of_stored.prompt));
      EXPECT_EQ(std::pair(all.dot[r], all.square[r]), sums_of(0, of_stored.count));
      double expected = 0;
      for (int column = 0; column < width; ++column) {
        const auto found = std::ranges::find(columns, column);
        const double y =
            found == columns.end() ? 0.0 : without_infinity(stored_at(row, static_cast<int>(found - columns.begin())));
        expected += std::abs(without_infinity(full_at(row, column)) - y / sum[r]);
      }
      EXPECT_EQ(distance[r], expected);
    }
  });
}

TEST(ComparisonKernels, ShowWhatIsNotANumber) {
  at_every_simd_level([](const char* level) {
    const int rows = tile_kernels().wide_keys;
    AlignedBuffer<double> buffer;
    double* numbers = buffer.at_least(static_cast<std::size_t>(rows));
    std::fill_n(numbers, rows, NAN);
    Sums logits(rows);
    std::vector<double> mass(static_cast<std::size_t>(rows));
    comparison_kernels().compare_logits(numbers, numbers, {.number = all_columns.data(), .count = 1, .prompt = 1},
                                        numbers, logits.sums(), mass.data());
    for (const auto& sums : {logits.dot, logits.square, mass})
      EXPECT_TRUE(std::ranges::all_of(sums, [](double sum) { return std::isnan(sum); })) << level;
  });
}

}  // namespace
}  // namespace kvreplay::testing
