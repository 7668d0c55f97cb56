// Quotients and percentiles with the edges that metrics state.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace kvreplay {

/// part / whole, and `undefined` for 0/0.
inline double quotient(double part, double whole, double undefined) {
  return part == 0 && whole == 0 ? undefined : part / whole;
}

/// dot / sqrt(square_a * square_b); `both_zero` when both vectors are, 0 when one is. Exactly 1 for a vector and
/// itself, however small its square is.
inline double cosine(double dot, double square_a, double square_b, double both_zero) {
  if (square_a == 0 && square_b == 0) return both_zero;
  if (square_a == 0 || square_b == 0) return 0.0;
  if (const double product = square_a * square_b; product > 1e-280 && product < 1e280) return dot / std::sqrt(product);
  // Others are scaled by powers of two with an even sum of exponents: nothing is rounded, and the product is a normal
  // number.
  const int of_a = std::ilogb(square_a);
  const int of_b = of_a + (std::ilogb(square_b) - of_a) / 2 * 2;
  return std::scalbn(dot, -(of_a + of_b) / 2) / std::sqrt(std::scalbn(square_a, -of_a) * std::scalbn(square_b, -of_b));
}

/// The value below which a share of `values` lies, which are reordered: linear between the two nearest, at the place
/// share * (n - 1) of the ascending values. NaN when one of them is NaN.
inline double percentile(std::span<double> values, double share) {
  if (std::ranges::any_of(values, [](double value) { return std::isnan(value); }))
    return std::numeric_limits<double>::quiet_NaN();
  std::ranges::sort(values);
  const double place = share * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const double lower = values[below], upper = values[std::min(below + 1, values.size() - 1)];
  const double part = place - static_cast<double>(below);
  return part == 0 || lower == upper ? lower : lower + part * (upper - lower);  // infinities are never subtracted
}

}  // namespace kvreplay
