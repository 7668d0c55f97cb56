// Ranking by score, ties to the lower position: the one order in which tokens stay. A score may be infinite, never NaN.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

namespace kvreplay {

/// A whole number of the same order: the bits of a double, those of negative ones inverted; -0 counts as 0.
inline std::uint64_t score_key(double score) {
  constexpr std::uint64_t sign = std::uint64_t{1} << 63;
  const auto bits = std::bit_cast<std::uint64_t>(score + 0.0);  // -0 + 0 is 0
  return bits ^ ((bits & sign) != 0 ? ~std::uint64_t{0} : sign);
}

/// All indices, best first; of equal scores the lower index comes first.
std::vector<std::int32_t> ranked(std::span<const double> scores);

/// All indices by ascending key; of equal keys the lower index comes first.
std::vector<std::int32_t> ordered(std::span<const std::uint64_t> keys);

/// Adds to each of the whole numbers in `counts` the place of its tie-breaker among all, below 1. Whole numbers below
/// 2^31 and fractions of as many bits as tokens are numbered by are exact in a double, and so is their order.
void break_ties(std::span<double> counts, std::span<const double> by);

/// Indices of the `count` best, ascending, each with `first` added; in O(n).
std::vector<std::int32_t> largest(std::span<const double> scores, std::int64_t count, std::int32_t first = 0);

/// The same for each of some counts: the best of few are searched among the best of more.
std::vector<std::vector<std::int32_t>> largest_of_each(std::span<const double> scores, std::span<const int> counts);

/// What parts the best of many scores from the others.
struct Cut {
  double score = 0;        // the worst of the best
  std::int64_t equal = 0;  // how many of this score are among the best
};

/// Where the `count` best of one or more scores end, 0 <= count <= n; in O(n).
Cut cut_after(std::span<const double> scores, std::int64_t count);

}  // namespace kvreplay
