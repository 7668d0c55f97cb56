// Quotients with the edges that metrics state.
#pragma once

#include <cmath>

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
  // By powers of two, whose product is an even one's: nothing is rounded, and the product stays a normal number.
  const int of_a = std::ilogb(square_a);
  const int of_b = of_a + (std::ilogb(square_b) - of_a) / 2 * 2;
  return std::scalbn(dot, -(of_a + of_b) / 2) / std::sqrt(std::scalbn(square_a, -of_a) * std::scalbn(square_b, -of_b));
}

}  // namespace kvreplay
