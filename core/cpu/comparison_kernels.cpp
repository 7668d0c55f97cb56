#include "cpu/comparison_kernels.h"

#include <cstddef>
#include <iterator>
#include <limits>
#include <numbers>

#include "attention/row_sums.h"
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

// 1 / k!
constexpr double inverse_factorials[] = {
    1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
    1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};

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

constexpr double least_exponent = -700;  // e^-700 is below any weight that counts, and a normal number

/// e^x for x <= 0, least_exponent for what is below it; NaN is NaN. Powers of two times the exponential series: |r| <=
/// ln 2 / 2, and r^14 / 14! is below 2^-57.
HWY_INLINE WideVector exponential(WideVector x) {
  // The last bits of t are those of a rounded x / ln 2, biased as the exponent of a double is.
  constexpr double round = 0x1.8p52 + 1023;
  constexpr double ln2_high = 0x1.62e42fee00000p-1, ln2_low = 0x1.a39ef35793c76p-33;
  x = hn::IfThenElse(hn::Lt(x, hn::Set(Doubles(), least_exponent)), hn::Set(Doubles(), least_exponent), x);
  const WideVector t = hn::Add(hn::Mul(x, hn::Set(Doubles(), std::numbers::log2e)), hn::Set(Doubles(), round));
  const WideVector n = hn::Sub(t, hn::Set(Doubles(), round));
  const WideVector r =
      hn::Sub(hn::Sub(x, hn::Mul(n, hn::Set(Doubles(), ln2_high))), hn::Mul(n, hn::Set(Doubles(), ln2_low)));
  WideVector series = hn::Set(Doubles(), inverse_factorials[std::size(inverse_factorials) - 1]);
#pragma GCC unroll 16
  for (std::size_t k = std::size(inverse_factorials) - 1; k-- > 0;)
    series = hn::Add(hn::Mul(series, r), hn::Set(Doubles(), inverse_factorials[k]));
  return hn::Mul(series, hn::BitCast(Doubles(), hn::ShiftLeft<52>(hn::BitCast(Longs(), t))));
}

void raise_highest(const double* logits, int columns, double* highest_out) {
  Rows highest = load_sums(highest_out);
  for (int j = 0; j < columns; ++j) {
    const Rows z = load(logits, j);
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) highest.x[v] = hn::IfThenElse(hn::Gt(z.x[v], highest.x[v]), z.x[v], highest.x[v]);
  }
  store_sums(highest, highest_out);
}

void softmax(double* logits, int columns, const double* highest_of, const double* sum_of) {
  const Rows highest = load_sums(highest_of);
  Rows sum = load_sums(sum_of);
  double* const end = logits + static_cast<std::ptrdiff_t>(columns) * wide_tile_columns;
  for (double* at = logits; at != end; at += wide_tile_columns) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      const WideVector power = exponential(hn::Sub(hn::Load(Doubles(), at + v * wide_lanes), highest.x[v]));
      const WideVector weight = hn::IfThenZeroElse(hn::Lt(power, hn::Set(Doubles(), least_weight)), power);
      sum.x[v] = hn::Add(sum.x[v], weight);
      hn::Store(weight, Doubles(), at + v * wide_lanes);
    }
  }
  for (double* at = logits; at != end; at += wide_tile_columns)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v)
      hn::Store(hn::Div(hn::Load(Doubles(), at + v * wide_lanes), sum.x[v]), Doubles(), at + v * wide_lanes);
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
  static const ComparisonKernels table{.raise_highest = raise_highest,
                                       .softmax = softmax,
                                       .align = align,
                                       .add_held = add_held,
                                       .add_distances = add_distances};
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
