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

HWY_INLINE void store(const Rows& rows, double* to, int column) {
  double* first = to + static_cast<std::ptrdiff_t>(column) * wide_tile_columns;
  hn::Store(rows.x[0], Doubles(), first);
  hn::Store(rows.x[1], Doubles(), first + wide_lanes);
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

void exponentials(const double* logits, int columns, const double* highest_of, double* out, double* sum_out) {
  const Rows highest = load_sums(highest_of);
  Rows sum = load_sums(sum_out);
  for (int j = 0; j < columns; ++j) {
    Rows power = load(logits, j);
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      power.x[v] = exponential(hn::Sub(power.x[v], highest.x[v]));
      power.x[v] = hn::IfThenZeroElse(hn::Lt(power.x[v], hn::Set(Doubles(), least_weight)), power.x[v]);
      sum.x[v] = hn::Add(sum.x[v], power.x[v]);
    }
    store(power, out, j);
  }
  store_sums(sum, sum_out);
}

/// True for NaN: sums with it are NaN. Ne() is false for it on some levels.
HWY_INLINE auto is_held(WideVector logits) {
  return hn::Not(hn::Eq(logits, hn::Set(Doubles(), -std::numeric_limits<double>::infinity())));
}

struct Alignment {
  Rows dot, square;

  HWY_INLINE void add(const Rows& full, const Rows& stored) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      dot.x[v] = hn::Add(dot.x[v], hn::Mul(full.x[v], stored.x[v]));
      square.x[v] = hn::Add(square.x[v], hn::Mul(stored.x[v], stored.x[v]));
    }
  }
  HWY_INLINE void store(const AlignmentSums& sums) const {
    store_sums(dot, sums.dot);
    store_sums(square, sums.square);
  }
};

HWY_INLINE Rows zeros() { return {{hn::Zero(Doubles()), hn::Zero(Doubles())}}; }

HWY_INLINE Rows held_or_zero(Rows logits) {
#pragma GCC unroll 2
  for (int v = 0; v < vectors; ++v) logits.x[v] = hn::IfThenElseZero(is_held(logits.x[v]), logits.x[v]);
  return logits;
}

void compare_logits(const double* full, const double* weights, const StoredColumns& columns, const double* stored,
                    AlignmentSums logits, double* mass_out) {
  Alignment sums{zeros(), zeros()};
  Rows mass = zeros();
  for (int j = 0; j < columns.count; ++j) {
    const Rows of_stored = load(stored, j), weight = load(weights, columns.number[j]);
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v)
      mass.x[v] = hn::Add(mass.x[v], hn::IfThenElseZero(is_held(of_stored.x[v]), weight.x[v]));
    if (j < columns.prompt) sums.add(held_or_zero(load(full, columns.number[j])), held_or_zero(of_stored));
  }
  sums.store(logits);
  store_sums(mass, mass_out);
}

void compare_weights(const double* full, int width, const StoredColumns& columns, double* stored, const double* sum_of,
                     const WeightSums& sums) {
  const Rows sum = load_sums(sum_of);
  Alignment all{zeros(), zeros()}, nosink{zeros(), zeros()};
  Rows distance = zeros();
  int j = 0, next = 0;  // next: the first column of `full` that has not been counted
  const auto add_distance_of_others = [&](int end) HWY_ATTR {
    for (; next < end; ++next) {
      const Rows of_full = load(full, next);
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) distance.x[v] = hn::Add(distance.x[v], hn::Abs(of_full.x[v]));
    }
  };
  const auto add_columns = [&](int end, bool after_sinks) HWY_ATTR {
    for (; j < end; ++j) {
      add_distance_of_others(columns.number[j]);
      Rows weight = load(stored, j);
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) weight.x[v] = hn::Div(weight.x[v], sum.x[v]);
      store(weight, stored, j);
      const Rows of_full = load(full, next++);  // after the store: `stored` may be `full`
      all.add(of_full, weight);
      if (after_sinks) nosink.add(of_full, weight);
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v)
        distance.x[v] = hn::Add(distance.x[v], hn::Abs(hn::Sub(of_full.x[v], weight.x[v])));
    }
  };
  add_columns(columns.sinks, false);
  add_columns(columns.prompt, true);
  nosink.store(sums.nosink);
  all.store(sums.prompt);
  add_columns(columns.count, false);
  add_distance_of_others(width);
  all.store(sums.all);
  store_sums(distance, sums.distance);
}

}  // namespace

const ComparisonKernels& comparison_table() {
  static const ComparisonKernels table{.raise_highest = raise_highest,
                                       .exponentials = exponentials,
                                       .compare_logits = compare_logits,
                                       .compare_weights = compare_weights};
  return table;
}

}  // namespace HWY_NAMESPACE
}  // namespace kvreplay
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvreplay {

HWY_EXPORT(comparison_table);

const ComparisonKernels& comparison_kernels() {
  simd_level();
  return HWY_DYNAMIC_DISPATCH(comparison_table)();
}

}  // namespace kvreplay
#endif
