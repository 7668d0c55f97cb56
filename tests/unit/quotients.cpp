#include "analysis/metrics/quotients.h"

#include <gtest/gtest.h>

#include <cmath>

namespace kvreplay {
namespace {

/// The cosine of vectors in exact arithmetic, as far as long double reaches.
double wide_cosine(double dot, double a, double b) {
  return static_cast<double>(static_cast<long double>(dot) /
                             (std::sqrt(static_cast<long double>(a)) * std::sqrt(static_cast<long double>(b))));
}

TEST(Cosine, OfProductsThatLeaveTheRangeIsThatOfOthers) {
  // Below and above the products that are taken as they are, and beyond float64.
  for (const double product : {1e-320, 1e-300, 0.99e-280, 1.01e-280, 1e-100, 1.0, 1e100, 0.99e280, 1.01e280, 1e300})
    for (const double ratio : {1.0, 3.7, 1e30, 1e-30}) {
      const double a = std::sqrt(product) * ratio, b = product / a;
      for (const double share : {0.25, -0.9, 1e-9}) {
        const double dot = share * std::sqrt(a) * std::sqrt(b);
        EXPECT_NEAR(cosine(dot, a, b, 1), wide_cosine(dot, a, b), 1e-15) << product << " " << ratio;
      }
    }
  for (const double square : {5e-324, 1e-200, 1e-141, 1e-139, 0.3, 1e139, 1e141, 1e308})
    EXPECT_EQ(cosine(square, square, square, 0), 1.0) << "a vector and itself";
  EXPECT_EQ(cosine(0, 0, 0, 1), 1.0);
  EXPECT_EQ(cosine(0, 0, 2, 1), 0.0);
}

}  // namespace
}  // namespace kvreplay
