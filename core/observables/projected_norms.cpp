#include "observables/projected_norms.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "cpu/combination_kernels.h"
#include "float_types.h"
#include "parallel.h"

namespace kvreplay {
namespace {

constexpr int block_tokens = 128;

/// Of tokens [first, first + count) in one query head.
void add_norms(const CombinationKernels& kernels, const TensorView& values, const TensorView& projection, int head,
               int group, int first, int count, std::span<double> norms) {
  const auto dim = static_cast<std::size_t>(values.dim);
  std::vector<std::array<float, block_tokens>> channels(dim);  // of the block's values
  std::vector<float> weights(dim);
  for (int i = 0; i < count; ++i)
    for (std::size_t c = 0; c < dim; ++c)
      channels[c][static_cast<std::size_t>(i)] = load(values.row(head / group, first + i), values.dtype, c);
  for (int row = 0; row < projection.tokens; ++row) {
    std::array<float, block_tokens> projected;
    for (std::size_t c = 0; c < dim; ++c)
      weights[c] = load(projection.row(0, row), projection.dtype, static_cast<std::size_t>(head) * dim + c);
    kernels.floats(weights.data(), values.dim, channels.front().data(), block_tokens, block_tokens, projected.data());
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i)
      norms[i] += std::abs(static_cast<double>(projected[i]));
  }
}

}  // namespace

Matrix projected_norms(const TensorView& values, const TensorView& projection, int group, int tokens, int threads) {
  const int heads = values.heads * group, blocks = (tokens + block_tokens - 1) / block_tokens;
  Matrix norms(heads, tokens);
  const CombinationKernels& kernels = combination_kernels();
  all_side_by_side(threads, static_cast<std::size_t>(heads) * static_cast<std::size_t>(blocks), [&](std::size_t i) {
    const int head = static_cast<int>(i) / blocks, first = static_cast<int>(i) % blocks * block_tokens;
    const int count = std::min(block_tokens, tokens - first);
    add_norms(kernels, values, projection, head, group, first, count,
              norms.row(head).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)));
  });
  return norms;
}

}  // namespace kvreplay
