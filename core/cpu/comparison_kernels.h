// Sums of the general comparison over the columns of rows that stand side by side, once for each SIMD level in the
// binary (simd_level.h).
#pragma once

#include <cstdint>

namespace kvreplay {

/// `full` is [width, rows], `stored` is [columns, rows]; column j of `stored` is column number[j] of `full`, and
/// numbers ascend. Every sum takes the columns in their order, product and sum are rounded one after the other: all
/// levels have the same bits. `rows` are as many as a tile of float64 is wide (TileKernels::wide_keys). Matrices are
/// aligned to vectors, sums need not be.
struct ComparisonKernels {
  /// highest[r] = max(highest[r], the largest of `columns` logits); NaN is passed over.
  void (*raise_highest)(const double* logits, int columns, double* highest);
  /// Logits of `columns` columns -> weights in place: e^(z - highest[r]), 0 below least_weight (attention/row_sums.h),
  /// and divided by the sum of all and of sum[r]. Exponentials are within 2 units in the last place.
  void (*softmax)(double* logits, int columns, const double* highest, const double* sum);
  /// dot[r] += Σ full * stored and square[r] += Σ stored² over the columns [begin, end) of `stored`; -infinity counts
  /// as 0.
  void (*align)(const double* full, const std::int32_t* number, const double* stored, int begin, int end, double* dot,
                double* square);
  /// mass[r] += Σ full over the columns of `stored` that are not -infinity.
  void (*add_held)(const double* full, const std::int32_t* number, const double* stored, int columns, double* mass);
  /// distance[r] += Σ |full - stored| over all columns of `full`; `stored` is 0 where it has no column.
  void (*add_distances)(const double* full, int width, const std::int32_t* number, const double* stored, int columns,
                        double* distance);
};

/// The kernels of the level that choose_simd_level() chooses. Throws as it does.
const ComparisonKernels& comparison_kernels();

}  // namespace kvreplay
