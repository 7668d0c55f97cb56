// The tokens into which evicted tokens are merged.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tensor.h"

namespace kvreplay {

/// The smallest length of a vector in a cosine: shorter ones count as this long.
inline constexpr double least_length = 1e-6;

struct SimilarToken {
  std::int32_t token = 0;
  double cosine = 0;
};

/// For each token of `some`, the token of `others` with the largest cosine of their keys in a KV head, of equal ones
/// the first: c = <k, k'> / (max(|k|, 1e-6) max(|k'|, 1e-6)). `others` is not empty.
std::vector<SimilarToken> most_similar(const TensorView& keys, int head, std::span<const std::int32_t> some,
                                       std::span<const std::int32_t> others);

}  // namespace kvreplay
