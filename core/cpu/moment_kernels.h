// The inner loops of the kept moments over one chunk of keys, once for each SIMD level in the binary (simd_level.h).
// Which keys of a chunk count is said by a mask of one bit a key.
#pragma once

#include <cstdint>

#include "attention/row_sums.h"

namespace kvreplay {

struct MomentKernels {
  /// Keys whose sums are taken in float32 before they join float64. Chunks begin at multiples of it whatever is kept,
  /// and a key that a set lacks is like a weight of zero.
  static constexpr int chunk_keys = 512;
  static constexpr int chunk_words = chunk_keys / 64;
  /// From one row of weights to the next: rows at a power of two would share few lines of the cache.
  static constexpr int row_stride = chunk_keys + 16;

  int rows;     // whose weights add_weighted_values takes at once
  int columns;  // `dim` is a multiple of it

  /// sums[i] += sums over the keys of masks[i], for numbers[chunk_keys] and `count` masks.
  void (*add_masked_sums)(const float* numbers, const std::uint64_t* const* masks, int count, MaskedSums* sums);
  /// out[chunk_keys] = numbers where the mask is set, 0 elsewhere.
  void (*apply_mask)(const float* numbers, const std::uint64_t* mask, float* out);
  /// The numbers whose mask is set, one after the other; how many they are. What follows them in out[chunk_keys] is
  /// lost.
  int (*gather)(const float* numbers, const std::uint64_t* mask, float* out);
  /// Σ a_i b_i, i < count <= chunk_keys.
  double (*dot)(const float* a, const float* b, int count);
  /// out[r, c] += Σ over `count` keys k of weights[r * row_stride + k] * values[k, c], r < rows, c < dim.
  void (*add_weighted_values)(const float* weights, const float* values, const std::int32_t* keys, int count, int dim,
                              double* out);
};

/// The kernels of simd_level(). Throws as it does.
const MomentKernels& moment_kernels();

}  // namespace kvreplay
