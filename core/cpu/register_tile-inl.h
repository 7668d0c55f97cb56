// What the kernels of a SIMD level share: its vectors, and products of a panel of rows and a tile of columns that stay
// in registers. Compiled anew in every pass of a file over Highway's targets.
#if defined(KVREPLAY_REGISTER_TILE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef KVREPLAY_REGISTER_TILE_INL_H
#undef KVREPLAY_REGISTER_TILE_INL_H
#else
#define KVREPLAY_REGISTER_TILE_INL_H
#endif

#include <hwy/highway.h>

/// Whether this pass is one of AVX-512: Highway numbers the better targets lower.
#undef KVREPLAY_AVX512
#define KVREPLAY_AVX512 (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3)

HWY_BEFORE_NAMESPACE();
namespace kvreplay {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Integers = hn::RebindToSigned<Floats>;
using Doubles = hn::ScalableTag<double>;
using Longs = hn::RebindToSigned<Doubles>;
using HalfFloats = hn::Rebind<float, Doubles>;  // as many as there are doubles in a vector
using Vector = hn::Vec<Floats>;
using WideVector = hn::Vec<Doubles>;

constexpr int lanes = static_cast<int>(hn::MaxLanes(Floats()));
constexpr int wide_lanes = static_cast<int>(hn::MaxLanes(Doubles()));
// Accumulators, two vectors of columns, one broadcast and one product fill the 32 registers of AVX-512, or the 16 of
// the others.
constexpr int vectors = 2;
constexpr int tile_rows = lanes >= 16 ? 12 : 6;
constexpr int tile_columns = vectors * lanes;
constexpr int wide_tile_columns = vectors * wide_lanes;

/// sum + row * column, rounded once.
struct FusedProduct {
  template <class V>
  static HWY_INLINE V add(V row, V column, V sum) {
    return hn::MulAdd(row, column, sum);
  }
};

/// Product and sum rounded one after the other: all levels have the same bits.
struct SeparateProduct {
  template <class V>
  static HWY_INLINE V add(V row, V column, V sum) {
    return hn::Add(sum, hn::Mul(row, column));
  }
};

#if KVREPLAY_AVX512
/// Of pairs of bfloat16 numbers, whose products are exact: VDPBF16PS. By its name, because a function with the
/// intrinsic would need a target of its own; which machines have it is known to simd_levels().
struct PairProduct {
  static HWY_INLINE Vector add(Vector row, Vector column, Vector sum) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(row.raw), "v"(column.raw));
    return sum;
  }
};
#endif

template <int height, class D>
HWY_INLINE void clear(D tag, hn::Vec<D> (&sums)[height][vectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < height; ++r) sums[r][0] = sums[r][1] = hn::Zero(tag);
}

/// sums[r][v] += rows[r * step] * tile[column]: every index of `sums` is a constant once unrolled.
template <class Product, int height, class D>
HWY_INLINE void add_row_products(D tag, const hn::TFromD<D>* rows, std::ptrdiff_t step, const hn::TFromD<D>* tile,
                                 hn::Vec<D> (&sums)[height][vectors]) {
  const hn::Vec<D> column0 = hn::Load(tag, tile);
  const hn::Vec<D> column1 = hn::Load(tag, tile + hn::MaxLanes(D()));
#pragma GCC unroll 16
  for (int r = 0; r < height; ++r) {
    const hn::Vec<D> broadcast = hn::Set(tag, rows[r * step]);
    sums[r][0] = Product::add(broadcast, column0, sums[r][0]);
    sums[r][1] = Product::add(broadcast, column1, sums[r][1]);
  }
}

/// sums[r][v] += Σ_k panel[k, r] * tile[k, column]. A panel is [depth, tile_rows], a tile [depth, `vectors` vectors].
template <class Product, int height, class D>
HWY_INLINE void multiply(D tag, const hn::TFromD<D>* panel, const hn::TFromD<D>* tile, int depth,
                         hn::Vec<D> (&sums)[height][vectors]) {
  constexpr int width = static_cast<int>(hn::MaxLanes(D()));
#pragma GCC unroll 2
  for (int k = 0; k < depth; ++k, panel += tile_rows, tile += vectors * width)
    add_row_products<Product>(tag, panel, 1, tile, sums);
}

/// out[r, column] = sums.
template <int height, class D>
HWY_INLINE void store(D tag, const hn::Vec<D> (&sums)[height][vectors], hn::TFromD<D>* out) {
  constexpr int width = static_cast<int>(hn::MaxLanes(D()));
#pragma GCC unroll 16
  for (int r = 0; r < height; ++r) {
    hn::Store(sums[r][0], tag, out + r * vectors * width);
    hn::Store(sums[r][1], tag, out + r * vectors * width + width);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvreplay
HWY_AFTER_NAMESPACE();

#endif
