#include <gtest/gtest.h>

#include <cstddef>
#include <span>
#include <vector>

#include "attention_reference.h"
#include "cpu/aligned_buffer.h"
#include "cpu/tile.h"
#include "float_types.h"
#include "random.h"

namespace kvreplay::testing {
namespace {

/// Finite numbers as a file may have them: from an odd address on.
std::vector<std::byte> stored_numbers(DType type, int count) {
  std::vector<std::byte> bytes(1);
  const auto append = [&bytes](auto number) {
    const auto of_number = std::as_bytes(std::span(&number, 1));
    bytes.insert(bytes.end(), of_number.begin(), of_number.end());
  };
  for (int i = 0; i < count; ++i) {
    const float number = static_cast<float>(uniform(chain(1, i)) - 0.5);
    if (type == DType::float32)
      append(number);
    else
      append(type == DType::float16 ? to_float16(number) : to_bfloat16(number));
  }
  return bytes;
}

TEST(TileKernels, WidenNumbersToDouble) {
  at_every_simd_level([](const char* level) {
    for (const DType type : {DType::float32, DType::float16, DType::bfloat16})
      for (const int count : {1, 7, 64, 65, 200}) {
        const std::vector<std::byte> bytes = stored_numbers(type, count);
        std::vector<double> wide(static_cast<std::size_t>(count) + 1, 7.0);
        tile_kernels().widen_to_double(bytes.data() + 1, type, count, wide.data());
        for (std::size_t i = 0; i + 1 < wide.size(); ++i)
          EXPECT_EQ(wide[i], static_cast<double>(load(bytes.data() + 1, type, i))) << level;
        EXPECT_EQ(wide.back(), 7.0) << "what comes after the numbers is not touched";
      }
  });
}

TEST(TileKernels, WideProductsAddInOrderHoweverThePanelLies) {
  at_every_simd_level([](const char* level) {
    const TileKernels& kernels = tile_kernels();
    constexpr int dim = 37;
    const auto row_number = [](int row, int k) { return uniform(chain(2, row, k)) - 0.5; };
    const auto key_number = [](int key, int k) { return uniform(chain(3, key, k)) * (k % 5 == 0 ? 1e6 : 1.0); };
    AlignedBuffer<double> by_row_buffer, by_number_buffer, tile_buffer, out_buffer;
    double* by_row = by_row_buffer.at_least(product(kernels.rows, dim));
    double* by_number = by_number_buffer.at_least(product(dim, kernels.rows));
    double* tile = tile_buffer.at_least(product(dim, kernels.wide_keys));
    double* out = out_buffer.at_least(product(kernels.rows, kernels.wide_keys));
    const auto at = [](int first, int second, int count) {
      return product(first, count) + static_cast<std::size_t>(second);
    };
    for (int k = 0; k < dim; ++k) {
      for (int row = 0; row < kernels.rows; ++row)
        by_row[at(row, k, dim)] = by_number[at(k, row, kernels.rows)] = row_number(row, k);
      for (int key = 0; key < kernels.wide_keys; ++key) tile[at(k, key, kernels.wide_keys)] = key_number(key, k);
    }
    for (const WidePanel panel : {WidePanel{by_row, dim, 1}, WidePanel{by_number, 1, kernels.rows}})
      for (int count = 1; count <= kernels.rows; ++count) {
        kernels.wide_products(panel, tile, dim, count, out);
        for (int row = 0; row < count; ++row)
          for (int key = 0; key < kernels.wide_keys; ++key) {
            double expected = 0;
            for (int k = 0; k < dim; ++k) expected += row_number(row, k) * key_number(key, k);
            ASSERT_EQ(out[at(row, key, kernels.wide_keys)], expected) << level << ", " << count << " rows";
          }
      }
  });
}

}  // namespace
}  // namespace kvreplay::testing
