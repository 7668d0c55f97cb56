// Sums of the general comparison over the columns of rows that stand side by side, once for each SIMD level in the
// binary (simd_level.h).
#pragma once

#include <cstdint>

namespace kvreplay {

/// Sums for each row: of products of full and stored numbers, and of squares of stored ones.
struct AlignmentSums {
  double* dot;
  double* square;
};

/// Of the weights of each row: the alignments over the columns [sinks, prompt), over [0, prompt) and over all, and
/// Σ |full - stored|.
struct WeightSums {
  AlignmentSums nosink, prompt, all;
  double* distance;
};

/// Columns of `stored`: column j is column number[j] of `full`, and numbers ascend.
struct StoredColumns {
  const std::int32_t* number;
  int count;
  int sinks = 0;   // of the first tokens, below the boundary
  int prompt = 0;  // below the boundary
};

/// `full` is [width, rows], `stored` is [columns, rows]. Every sum takes the columns in their order, product and sum
/// are rounded one after the other: all levels have the same bits. `rows` are as many as a tile of float64 is wide
/// (TileKernels::wide_keys). Matrices are aligned to vectors, sums need not be.
struct ComparisonKernels {
  /// highest[r] = max(highest[r], the largest of `columns` logits); NaN is passed over.
  void (*raise_highest)(const double* logits, int columns, double* highest);
  /// Logits of `columns` columns -> exponentials e^(z - highest[r]), 0 below least_weight (attention/row_sums.h), which
  /// are added to sum[r]. They are within 2 units in the last place, and may stand where the logits stood.
  void (*exponentials)(const double* logits, int columns, const double* highest, double* out, double* sum);
  /// The alignment of logits over the columns below the boundary, where -infinity counts as 0, and
  /// mass[r] = Σ weights, of the full attention, over the columns of `stored` that are not -infinity.
  void (*compare_logits)(const double* full, const double* weights, const StoredColumns& columns, const double* stored,
                         AlignmentSums logits, double* mass);
  /// Exponentials -> weights in place, divided by sum[r], and their sums. Columns that `stored` lacks count as 0.
  /// `stored` and `full` may be the same matrix: the sums are then those of the weights.
  void (*compare_weights)(const double* full, int width, const StoredColumns& columns, double* stored,
                          const double* sum, const WeightSums& sums);
};

/// The kernels of simd_level(). Throws as it does.
const ComparisonKernels& comparison_kernels();

}  // namespace kvreplay
