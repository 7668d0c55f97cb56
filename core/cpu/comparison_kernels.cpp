#include "cpu/comparison_kernels.h"

#include <cstddef>
#include <limits>

#include "cpu/simd_level.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/comparison_kernels.cpp"
#include <hwy/foreach_target.h>
// Highway's order: its own headers come after foreach_target.h, in every pass over this file.
#include <hwy/highway.h>

#include "cpu/register_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvreplay {
namespace HWY_NAMESPACE {
namespace {

/// Rows that stand side by side.
struct Rows {
  WideVector x[vectors];
};

HWY_INLINE Rows load(const double* from, int column) {
  const double* first = from + static_cast<std::ptrdiff_t>(column) * wide_tile_columns;
  return {{hn::Load(Doubles(), first), hn::Load(Doubles(), first + wide_lanes)}};
}

HWY_INLINE Rows load_sums(const double* from) {
  return {{hn::LoadU(Doubles(), from), hn::LoadU(Doubles(), from + wide_lanes)}};
}

HWY_INLINE void store_sums(const Rows& rows, double* to) {
  hn::StoreU(rows.x[0], Doubles(), to);
  hn::StoreU(rows.x[1], Doubles(), to + wide_lanes);
}

/// True for NaN: sums with it are NaN. Ne() is false for it on some levels.
HWY_INLINE auto is_held(WideVector logits) {
  return hn::Not(hn::Eq(logits, hn::Set(Doubles(), -std::numeric_limits<double>::infinity())));
}

void align(const double* full, const std::int32_t* number, const double* stored, int begin, int end, double* dot_out,
           double* square_out) {
  Rows dot = load_sums(dot_out), square = load_sums(square_out);
  for (int j = begin; j < end; ++j) {
    const Rows of_full = load(full, number[j]), of_stored = load(stored, j);
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      const WideVector x = hn::IfThenElseZero(is_held(of_full.x[v]), of_full.x[v]);
      const WideVector y = hn::IfThenElseZero(is_held(of_stored.x[v]), of_stored.x[v]);
      dot.x[v] = hn::Add(dot.x[v], hn::Mul(x, y));
      square.x[v] = hn::Add(square.x[v], hn::Mul(y, y));
    }
  }
  store_sums(dot, dot_out);
  store_sums(square, square_out);
}

void add_held(const double* full, const std::int32_t* number, const double* stored, int columns, double* mass_out) {
  Rows mass = load_sums(mass_out);
  for (int j = 0; j < columns; ++j) {
    const Rows of_full = load(full, number[j]), of_stored = load(stored, j);
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v)
      mass.x[v] = hn::Add(mass.x[v], hn::IfThenElseZero(is_held(of_stored.x[v]), of_full.x[v]));
  }
  store_sums(mass, mass_out);
}

void add_distances(const double* full, int width, const std::int32_t* number, const double* stored, int columns,
                   double* distance_out) {
  Rows distance = load_sums(distance_out);
  for (int column = 0, j = 0; column < width; ++column) {
    Rows difference = load(full, column);
    if (j < columns && number[j] == column) {
      const Rows of_stored = load(stored, j++);
      for (int v = 0; v < vectors; ++v) difference.x[v] = hn::Sub(difference.x[v], of_stored.x[v]);
    }
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) distance.x[v] = hn::Add(distance.x[v], hn::Abs(difference.x[v]));
  }
  store_sums(distance, distance_out);
}

}  // namespace

const ComparisonKernels& comparison_table() {
  static const ComparisonKernels table{.align = align, .add_held = add_held, .add_distances = add_distances};
  return table;
}

}  // namespace HWY_NAMESPACE
}  // namespace kvreplay
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvreplay {

HWY_EXPORT(comparison_table);

const ComparisonKernels& comparison_kernels() {
  choose_simd_level();
  return HWY_DYNAMIC_DISPATCH(comparison_table)();
}

}  // namespace kvreplay
#endif
