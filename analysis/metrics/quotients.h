// Quotients with the edges that metrics state.
#pragma once

#include <cmath>

namespace kvreplay {

/// part / whole, and `undefined` for 0/0.
inline double quotient(double part, double whole, double undefined) {
  return part == 0 && whole == 0 ? undefined : part / whole;
}

/// dot / sqrt(square_a * square_b); `both_zero` when both vectors are, 0 when one is. Exactly 1 for a vector and
/// itself.
inline double cosine(double dot, double square_a, double square_b, double both_zero) {
  if (square_a == 0 && square_b == 0) return both_zero;
  return square_a == 0 || square_b == 0 ? 0.0 : dot / std::sqrt(square_a * square_b);
}

}  // namespace kvreplay
