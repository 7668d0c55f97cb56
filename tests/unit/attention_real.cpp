// Cumulative attention of a real model, against float64: what sums of a random layer do not show is how far the logits
// of a model spread.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "attention_reference.h"
#include "trace/trace.h"

namespace kvreplay::testing {
namespace {

/// Rows of a tensor as the numbers they are.
std::vector<std::vector<double>> rows_of(const TensorView& tensor, int head, int tokens) {
  std::vector<std::vector<double>> rows;
  for (int token = 0; token < tokens; ++token) {
    std::vector<double>& row = rows.emplace_back();
    for (int c = 0; c < tensor.dim; ++c) {
      const std::byte* at = tensor.row(head, token) + static_cast<std::size_t>(c) * size_of(tensor.dtype);
      std::uint32_t bits = 0;
      std::memcpy(&bits, at, size_of(tensor.dtype));
      row.push_back(static_cast<double>(tensor.dtype == DType::float16 ? from_float16(static_cast<std::uint16_t>(bits))
                                        : tensor.dtype == DType::float32 ? std::bit_cast<float>(bits)
                                                                         : std::bit_cast<float>(bits << 16)));
    }
  }
  return rows;
}

/// The first `tokens` tokens of a layer: every sum within 1e-5 of float64, and the tenth of them with the largest sums
/// the same but for sums within 1e-5 of the last that belongs to it.
void expect_sums_of_float64(const LayerTensors& layer, int tokens) {
  const std::vector<std::int32_t> queries = range(0, tokens);
  const Matrix found = tested_backend(2)->attention_sums(layer, {.queries = queries, .columns = tokens});
  for (int head = 0; head < layer.q.heads; ++head) {
    const auto q = rows_of(layer.q, head, tokens);
    const auto k = rows_of(layer.k, head / layer.group(), tokens);
    std::vector<double> expected(static_cast<std::size_t>(tokens));
    for (std::size_t t = 0; t < q.size(); ++t) {
      std::vector<double> z;
      for (std::size_t key = 0; key <= t; ++key)
        z.push_back(static_cast<double>(layer.softmax_scale) *
                    std::inner_product(q[t].begin(), q[t].end(), k[key].begin(), 0.0));
      const std::vector<double> a = softmax(z);
      for (std::size_t key = 0; key <= t; ++key) expected[key] += a[key];
    }
    const auto sums = found.row(head);
    for (std::size_t key = 0; key < expected.size(); ++key)
      ASSERT_NEAR(sums[key], expected[key], 1e-5 * expected[key]) << "head " << head << ", key " << key;
    const std::size_t kept = expected.size() / 10;
    std::vector<double> largest = expected;
    std::ranges::sort(largest, std::greater());
    std::vector<std::size_t> order(expected.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::sort(order, [&](std::size_t a, std::size_t b) { return sums[a] > sums[b]; });
    for (std::size_t i = 0; i < kept; ++i)
      ASSERT_GE(expected[order[i]], largest[kept - 1] * (1.0 - 1e-5)) << "head " << head << ", key " << order[i];
  }
}

TEST(RealAttention, IsThatOfFloat64AtEverySimdLevel) {
  const Trace trace = Trace::open(std::filesystem::path(KVREPLAY_TRACES) / "smollm2-135m-needle.h5");
  const int tokens = std::min(trace.header().tokens(), 400);
  for (const int layer : {0, 1})
    at_every_simd_level([&](const char*) { expect_sums_of_float64(trace.layer(layer), tokens); });
}

}  // namespace
}  // namespace kvreplay::testing
