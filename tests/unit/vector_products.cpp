#include "observables/vector_products.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "random.h"

namespace kvreplay {
namespace {

TEST(VectorProducts, AreSumsInOrderBeyondABlock) {
  constexpr int count = 1200, dim = 5, lists = 6, first = 3, wanted = 1100;
  const auto number = [](std::uint64_t of, int a, int b) { return uniform(chain(of, a, b)) - 0.5; };
  const Vectors vectors{1, count, dim, [&](int, int i, std::span<double> vector) {
                          for (int c = 0; c < dim; ++c) vector[static_cast<std::size_t>(c)] = number(1, i, c);
                        }};
  std::vector<double> xs;
  for (int list = 0; list < lists; ++list)
    for (int c = 0; c < dim; ++c) xs.push_back(number(2, list, c));
  std::vector<double> found(std::size_t{lists} * wanted);
  VectorProducts(vectors, 0).with_each(xs, first, found);
  for (int list = 0; list < lists; ++list)
    for (int i = 0; i < wanted; ++i) {
      double expected = 0;
      for (int c = 0; c < dim; ++c) expected += xs[static_cast<std::size_t>(list * dim + c)] * number(1, first + i, c);
      ASSERT_EQ(found[static_cast<std::size_t>(list * wanted + i)], expected) << "list " << list << ", vector " << i;
    }
}

}  // namespace
}  // namespace kvreplay
