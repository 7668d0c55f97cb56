// Inner loops over token vectors: cosines, their maxima, the redundancy of tokens; once for each SIMD level in the
// binary (simd_level.h).
//
// Vectors are packed in panels of `rows` and in tiles of `columns`, dimension-major: [dim, rows] and [dim, columns].
// Every sum over dimensions takes them in the same order wherever a vector stands, and a product does not depend on the
// order of its factors: equal vectors have equal cosines, and the cosine of i and j is that of j and i.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvreplay {

/// Below any cosine, also of vectors scaled to lengths in [1/2, 1), whose scales are up to 2.
inline constexpr float below_any_cosine = -4.0F;

/// One panel against one tile, a chunk of their dimensions. Words are float32 numbers, or pairs of bfloat16.
struct CosineChunk {
  const float* panel = nullptr;  // [words, rows]
  const float* tile = nullptr;   // [words, columns]
  int words = 0;
  bool first = true;      // nothing has been summed before
  float* sums = nullptr;  // [rows, columns] of the chunks before
};

/// Row r sees the columns below `seen` + r; rows from `row_count` on are padding. cos = product * row scale * column
/// scale.
struct CosineMaxima {
  int seen = 0;
  int row_count = 0;
  const float* row_scales = nullptr;     // [rows]
  const float* column_scales = nullptr;  // [columns]
  float* row_maxima = nullptr;           // [rows, lanes] of product * column scale
  float* column_maxima = nullptr;        // [columns] of product * row scale
};

/// The same in float64, dimension by dimension.
struct WideChunk {
  const double* panel = nullptr;  // [dims, rows]
  const double* tile = nullptr;   // [dims, wide_columns]
  int dims = 0;
  bool of_floats = false;  // all numbers are float32: their products are exact, and may be fused with the sums
  bool first = true;
  double* sums = nullptr;  // [rows, wide_columns]
};

/// Σ over some members i of clamp(S_ij, low_i, high_i) - low_i: what they add to Add(j), or what is taken from it.
struct ExcessTerm {
  const std::int32_t* row = nullptr;  // S_i
  std::int32_t low = 0;
  std::int32_t high = 0;
};

/// What one matrix of similarities changes in Add when a token joins.
struct RedundancyStep {
  const ExcessTerm* added = nullptr;
  int added_count = 0;
  const ExcessTerm* removed = nullptr;
  int removed_count = 0;
  const std::int32_t* joining = nullptr;  // the newcomer's row raises `highest`; null: there is none
  std::int32_t* highest = nullptr;        // [tokens] max of S_ij over the members
};

struct SimilarityKernels {
  int rows;
  int columns;
  int wide_columns;  // of a tile of float64
  int lanes;         // of float32

  /// (Σ |x|^p)^(1/p), in float64; not finite if some x is not.
  double (*norm)(const float* vector, int count, double p);

  /// vectors[i] *= factors[i], exact for powers of two.
  void (*scale)(float* vectors, int count, int dim, const double* factors);
  /// out[c, r] = vectors[r, c], r < width; rows from `count` on are zeros.
  void (*pack)(const float* vectors, int count, int dim, int width, float* out);
  /// The same for numbers that bfloat16 holds exactly, in pairs: out[ceil(dim / 2), width].
  void (*pack_pairs)(const float* vectors, int count, int dim, int width, float* out);
  /// sums += products of a chunk.
  void (*add_products)(const CosineChunk& chunk);
  /// The same for the last chunk, and the maxima over what rows see; sums are not stored.
  void (*raise_maxima)(const CosineChunk& chunk, const CosineMaxima& maxima);
  /// On the instruction made for pairs of bfloat16; null where there is none.
  void (*add_pair_products)(const CosineChunk& chunk);
  void (*raise_pair_maxima)(const CosineChunk& chunk, const CosineMaxima& maxima);

  /// As `pack`, in float64, and scales[r] = 2^15 / |vector r|, 0 for a zero vector and for padding. All levels have the
  /// same bits, here and below: products and sums are rounded one after the other, dimension by dimension.
  void (*pack_wide)(const double* vectors, int count, int dim, int width, double* out, double* scales);
  /// sums += products of a chunk.
  void (*add_wide_products)(const WideChunk& chunk);
  /// The same for the last chunk, times the scales, rounded to integers S: out[r, column], and turned[column, r] unless
  /// that is null. Rows of either are `stride` apart; sums are not stored.
  void (*store_similarities)(const WideChunk& chunk, const double* row_scales, const double* column_scales,
                             std::size_t stride, std::int32_t* out, std::int32_t* turned);

  /// Members i with S_i > red[i]: their number, and which they are. Arrays are padded to whole vectors of `lanes`.
  int (*find_raised)(const std::int32_t* row, const std::int32_t* red, int tokens, std::int32_t* found);
  /// excess += added - removed, highest = max(highest, joining); then the token of least (of greatest) excess + Σ
  /// highest, of equal ones the first.
  int (*redundancy_step)(const RedundancyStep* parts, int count, int tokens, bool greatest, std::int64_t* excess);
};

/// The kernels of simd_level(). Throws as it does.
const SimilarityKernels& similarity_kernels();

}  // namespace kvreplay
