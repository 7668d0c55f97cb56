// Inner loops over held tokens, once for each SIMD level in the binary (simd_level.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvreplay {

/// The exponentials of one query and head over slots: pieces of `keys`, `stride` apart. Slots that it does not see
/// have 0.
struct SlotRow {
  const float* exponentials = nullptr;
  std::ptrdiff_t stride = 0;
  float sum = 0.0F;
};

struct OnlineKernels {
  /// Σ of a row's exponentials, in float64.
  double (*sum)(const SlotRow& row, int tiles, int keys);
  /// scores[slot] += mean over the rows of exponential / sum. Equal exponentials have equal shares, and one that is all
  /// of its sum exactly 1.
  void (*add_shares)(const SlotRow* rows, int count, int tiles, int keys, double* scores);
  /// The slot of the lowest score among positions in [begin, end), of equal scores that of the highest position; -1:
  /// there is none. Arrays are padded to whole tiles with positions that are not below `end`.
  int (*lowest)(const double* scores, const std::int64_t* positions, int count, std::int64_t begin, std::int64_t end);
};

/// The kernels of simd_level(). Throws as it does.
const OnlineKernels& online_kernels();

}  // namespace kvreplay
