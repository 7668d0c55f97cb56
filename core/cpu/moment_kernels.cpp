#include "cpu/moment_kernels.h"

#include <cstddef>

#include "cpu/simd_level.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/moment_kernels.cpp"
#include <hwy/foreach_target.h>
// Highway's order: its own headers come after foreach_target.h, in every pass over this file.
#include <hwy/highway.h>

#include "cpu/register_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvreplay {
namespace HWY_NAMESPACE {
namespace {

constexpr int chunk_keys = MomentKernels::chunk_keys;

/// The mask of the `lanes` keys from `key` on, of the 64 of one word.
HWY_INLINE hn::Mask<Floats> mask_at(std::uint64_t word, int key) {
  const std::uint64_t bits = word >> key;
  std::uint8_t bytes[sizeof bits];
  hwy::CopySameSize(&bits, &bytes);
  return hn::LoadMaskBits(Floats(), bytes);
}

/// Lanes [first, first + wide_lanes) of a stored vector.
HWY_INLINE WideVector widened(const float* stored, int first) {
  return hn::PromoteTo(Doubles(), hn::Load(HalfFloats(), stored + first));
}

HWY_INLINE double sum_of_lanes(Vector x) {
  HWY_ALIGN float stored[lanes];
  hn::Store(x, Floats(), stored);
  WideVector sum = hn::Zero(Doubles());
#pragma GCC unroll 2
  for (int lane = 0; lane < lanes; lane += wide_lanes) sum = hn::Add(sum, widened(stored, lane));
  return hn::GetLane(hn::SumOfLanes(Doubles(), sum));
}

void add_masked_sums(const float* numbers, const std::uint64_t* const* masks, int count, MaskedSums* sums) {
  const Floats floats;
  for (int i = 0; i < count; ++i) {
    Vector sum[vectors] = {hn::Zero(floats), hn::Zero(floats)};
    Vector square[vectors] = {hn::Zero(floats), hn::Zero(floats)};
#pragma GCC unroll 1
    for (int w = 0; w < MomentKernels::chunk_words; ++w) {
      const std::uint64_t word = masks[i][w];
#pragma GCC unroll 16
      for (int v = 0; v < 64 / lanes; ++v) {
        const Vector x = hn::MaskedLoad(mask_at(word, v * lanes), floats, numbers + 64 * w + v * lanes);
        sum[v % vectors] = hn::Add(sum[v % vectors], x);
        square[v % vectors] = hn::MulAdd(x, x, square[v % vectors]);
      }
    }
    sums[i].sum += sum_of_lanes(hn::Add(sum[0], sum[1]));
    sums[i].square += sum_of_lanes(hn::Add(square[0], square[1]));
  }
}

void apply_mask(const float* numbers, const std::uint64_t* mask, float* out) {
  const Floats floats;
  for (int key = 0; key < chunk_keys; key += lanes)
    hn::Store(hn::MaskedLoad(mask_at(mask[key / 64], key % 64), floats, numbers + key), floats, out + key);
}

int gather(const float* numbers, const std::uint64_t* mask, float* out) {
  const Floats floats;
  int count = 0;
  for (int key = 0; key < chunk_keys; key += lanes) {
    const hn::Mask<Floats> some = mask_at(mask[key / 64], key % 64);
    // Whole vectors one over the other's end, since storing part of one is slow on some machines.
    hn::StoreU(hn::Compress(hn::Load(floats, numbers + key), some), floats, out + count);
    count += static_cast<int>(hn::CountTrue(floats, some));
  }
  return count;
}

/// In float64: a product of two small weights would be lost in float32.
double dot(const float* a, const float* b, int count) {
  const Doubles doubles;
  const HalfFloats floats;
  WideVector sum = hn::Zero(doubles);
  for (int i = 0; i < count; i += wide_lanes) {
    const auto some = hn::FirstN(floats, static_cast<std::size_t>(count - i));
    const WideVector x = hn::PromoteTo(doubles, hn::MaskedLoad(some, floats, a + i));
    const WideVector y = hn::PromoteTo(doubles, hn::MaskedLoad(some, floats, b + i));
    sum = hn::MulAdd(x, y, sum);
  }
  return hn::GetLane(hn::SumOfLanes(doubles, sum));
}

/// One tile of columns, in registers: every index of `sums` is a constant once unrolled.
HWY_NOINLINE void add_columns(const float* weights, const float* values, const std::int32_t* keys, int count, int dim,
                              double* out) {
  const Floats floats;
  const Doubles doubles;
  Vector sums[tile_rows][vectors];
  clear(floats, sums);
  for (int i = 0; i < count; ++i) {
    const float* weight = weights + keys[i];
    const float* value = values + static_cast<std::ptrdiff_t>(keys[i]) * dim;
    const Vector value0 = hn::Load(floats, value);
    const Vector value1 = hn::Load(floats, value + lanes);
#pragma GCC unroll 16
    for (int r = 0; r < tile_rows; ++r) {
      const Vector broadcast = hn::Set(floats, weight[r * MomentKernels::row_stride]);
      sums[r][0] = hn::MulAdd(broadcast, value0, sums[r][0]);
      sums[r][1] = hn::MulAdd(broadcast, value1, sums[r][1]);
    }
  }
  HWY_ALIGN float stored[tile_rows * tile_columns];
  store(floats, sums, stored);
  for (int r = 0; r < tile_rows; ++r) {
    double* row = out + static_cast<std::ptrdiff_t>(r) * dim;
#pragma GCC unroll 4
    for (int column = 0; column < tile_columns; column += wide_lanes) {
      const WideVector sum = hn::Add(hn::Load(doubles, row + column), widened(stored, r * tile_columns + column));
      hn::Store(sum, doubles, row + column);
    }
  }
}

void add_weighted_values(const float* weights, const float* values, const std::int32_t* keys, int count, int dim,
                         double* out) {
  for (int column = 0; column < dim; column += tile_columns)
    add_columns(weights, values + column, keys, count, dim, out + column);
}

}  // namespace

const MomentKernels& moments() {
  static const MomentKernels table{
      .rows = tile_rows,
      .columns = tile_columns,
      .add_masked_sums = add_masked_sums,
      .apply_mask = apply_mask,
      .gather = gather,
      .dot = dot,
      .add_weighted_values = add_weighted_values,
  };
  return table;
}

}  // namespace HWY_NAMESPACE
}  // namespace kvreplay
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvreplay {

HWY_EXPORT(moments);

const MomentKernels& moment_kernels() {
  simd_level();
  return HWY_DYNAMIC_DISPATCH(moments)();
}

}  // namespace kvreplay
#endif
