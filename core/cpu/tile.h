// The backend's inner loops over tiles of query rows by keys, once for each SIMD level in the binary (simd_level.h).
//
// Keys are packed in tiles of `keys` columns, queries in panels of `rows` rows, both cell-major: [cells, keys] and
// [cells, rows]. Every column of a tile goes through the same operations in the same order, so equal keys give equal
// results wherever they stand; what lies past the last row or key is padding, never another loop.
//
// A cell has 32 bits, and a form (TileForm) says what they are. float32: one number, widened exactly. bfloat16: two
// neighbouring numbers of a vector as they are stored, after an odd last one a zero; only where queries and keys are
// both stored so and none has moved, and at the level that multiplies such pairs in one instruction. Its products are
// exact too and its sums are of float32, so both forms are equally near to float64; but numbers and sums below 2^-126
// count as 0 in it.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "tensor.h"

namespace kvreplay {

/// Which keys the rows of one panel see: row r sees [first_r, end_r).
struct PanelRange {
  int lowest_first = 0;
  int highest_first = 0;
  int lowest_end = 0;
  int highest_end = 0;

  bool sees_some(int begin, int end) const { return begin < highest_end && end > lowest_first; }
  bool sees_all(int begin, int end) const { return begin >= highest_first && end <= lowest_end; }
};

/// A block of query rows and its exponentials p = 2^(x - R), x = logit * log2(e). R, the row's reference, is an
/// integer: it is subtracted in the exponent, so that any R gives the same bits of p but for its scale. All pointers
/// are the caller's, 64-byte aligned.
struct TileBlock {
  int rows = 0;  // in use; of the last panel the kernels compute as few as hold them
  int panels = 0;
  int cells = 0;                        // of a packed vector
  int first_tile = 0;                   // the first tile that any row sees: where `exponentials` begins
  const float* queries = nullptr;       // [panels, cells, rows]
  const std::int32_t* first = nullptr;  // [panels * rows]
  const std::int32_t* end = nullptr;    // [panels * rows]
  const PanelRange* ranges = nullptr;   // [panels]
  float scale = 1.0F;                   // bfloat16: of products; queries of float32 are scaled when they are packed
  float cap = 0.0F;                     // x = cap * tanh(scaled product); 0: x = scaled product
  float* reference = nullptr;           // [panels * rows] R, -infinity until the row has seen a key
  bool* settled = nullptr;              // [panels] all rows in use have a reference
  float* lane_sums = nullptr;           // [panels * rows, keys] Σ p since the last fold
  double* row_sums = nullptr;           // [panels * rows] Σ p before it
  float* exponentials = nullptr;  // [tiles, panels, rows, keys]; a tile that a panel does not see is left as it is
  float* logits = nullptr;        // the same of x, 0 where not visible; null: not wanted
};

/// The logits x of one row, side by side in whole tiles, and its exponentials with them. Both are the caller's, 64-byte
/// aligned.
struct LogitRow {
  const float* logits = nullptr;
  float* exponentials = nullptr;  // of tiles that the row does not see they are left as they are
  int first = 0;                  // sees the keys [first, end)
  int end = 0;
  float reference = -HUGE_VALF;  // R, -infinity until the row has seen a key
  double sum = 0.0;              // Σ p
};

// Number of tiles over which sums are added in float32 before they are folded.
inline constexpr int tiles_between_folds = 32;

/// The kernels that depend on what a cell is.
struct TileForm {
  int numbers_a_cell;

  int cells(int dim) const { return (dim + numbers_a_cell - 1) / numbers_a_cell; }
  /// out[cell, r] = that cell of vectors[r], r < width; the vectors may lie at any byte address.
  void (*pack)(const std::byte* const* vectors, DType type, int dim, int width, float* out);
  /// Logits of one tile -> exponentials and row sums. False: some logit stands so far above its row's reference that
  /// 2^(x - R) would leave float's range; then references must be raised and the block begun again. A logit that is not
  /// a number makes the row's sum none.
  bool (*exponentials)(const TileBlock& block, const float* keys, int tile);
  /// reference = max(reference, ceil(largest visible x of this tile)).
  void (*raise_references)(const TileBlock& block, const float* keys, int tile);
  /// out[row, key] = logits of one tile, visible or not; rows are `stride` numbers apart.
  void (*logits)(const TileBlock& block, const float* keys, std::ptrdiff_t stride, float* out);
};

/// Number k of row r is rows[r * row_step + k * step].
struct WidePanel {
  const double* rows;
  std::ptrdiff_t row_step;
  std::ptrdiff_t step;
};

struct TileKernels {
  int rows;
  int keys;
  int wide_keys;  // of a tile of float64
  TileForm float32;
  const TileForm* bfloat16;  // null: not at this level

  /// Exact widening of `count` numbers.
  void (*widen)(const std::byte* source, DType type, int count, float* out);
  void (*widen_to_double)(const std::byte* source, DType type, int count, double* out);
  /// A packed tile of keys in float64: out[c, r] = keys[r, c], r < wide_keys; keys from `count` on are zeros.
  void (*wide_pack)(const double* keys, int count, int dim, double* out);

  /// What exponentials() and raise_references() of a block do with a row of these logits, tile by tile, with the same
  /// bits.
  bool (*row_exponentials)(LogitRow& row);
  void (*raise_row_reference)(LogitRow& row);
  /// sums[key - first] += factor * p[key] for the keys that the row sees.
  void (*add_row_shares)(const LogitRow& row, float factor, double* sums);
  /// The same number where it is larger, in place of the sum.
  void (*raise_to_row_shares)(const LogitRow& row, float factor, double* largest);

  /// row_sums += lane_sums, which begin again.
  void (*fold_row_sums)(const TileBlock& block);
  /// columns[key] += Σ over the rows [begin, end) of factors[row] * p[row, key].
  void (*add_columns)(const TileBlock& block, int tile, int begin, int end, const float* factors, double* columns);
  /// out[rows, wide_keys] = products of one panel of rows, the first `count` at least, and one packed tile of keys. As
  /// many rows as a panel has are read whatever the count. Every sum begins with the first dimension, product and sum
  /// are rounded one after the other, so all levels and counts have the same bits.
  void (*wide_products)(const WidePanel& panel, const double* tile, int dim, int count, double* out);
};

/// The kernels of simd_level(). Throws as it does.
const TileKernels& tile_kernels();

}  // namespace kvreplay
