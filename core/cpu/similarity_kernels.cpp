#include "cpu/similarity_kernels.h"

#include <bit>
#include <cmath>

#include "cpu/simd_level.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/similarity_kernels.cpp"
#include <hwy/foreach_target.h>
// Highway's order: its own headers come after foreach_target.h, in every pass over this file.
#include <hwy/highway.h>

#include "cpu/register_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvreplay {
namespace HWY_NAMESPACE {
namespace {

using HalfIntegers = hn::Rebind<std::int32_t, Longs>;

HWY_INLINE std::ptrdiff_t at(int row, int width) { return static_cast<std::ptrdiff_t>(row) * width; }

// ---- vectors

template <class Term>
HWY_INLINE WideVector fold_vector(const float* vector, int count, Term term) {
  const Doubles doubles;
  const HalfFloats halves;
  // Four chains hide the latency of a sum.
  WideVector sums[4] = {hn::Zero(doubles), hn::Zero(doubles), hn::Zero(doubles), hn::Zero(doubles)};
  int i = 0;
  for (; i + 4 * wide_lanes <= count; i += 4 * wide_lanes) {
#pragma GCC unroll 4
    for (int chain = 0; chain < 4; ++chain)
      sums[chain] =
          term(sums[chain], hn::Abs(hn::PromoteTo(doubles, hn::LoadU(halves, vector + i + chain * wide_lanes))));
  }
  for (; i + wide_lanes <= count; i += wide_lanes)
    sums[0] = term(sums[0], hn::Abs(hn::PromoteTo(doubles, hn::LoadU(halves, vector + i))));
  if (i < count) {
    HWY_ALIGN float rest[lanes] = {};
    for (int c = i; c < count; ++c) rest[c - i] = vector[c];
    sums[0] = term(sums[0], hn::Abs(hn::PromoteTo(doubles, hn::Load(halves, rest))));
  }
  return term.join(sums[0], sums[1], sums[2], sums[3]);
}

struct Largest {
  HWY_INLINE WideVector operator()(WideVector sum, WideVector x) const { return hn::Max(sum, x); }
  HWY_INLINE WideVector join(WideVector a, WideVector b, WideVector c, WideVector d) const {
    return hn::Max(hn::Max(a, b), hn::Max(c, d));
  }
};
struct Sum {
  HWY_INLINE WideVector operator()(WideVector sum, WideVector x) const { return hn::Add(sum, x); }
  HWY_INLINE WideVector join(WideVector a, WideVector b, WideVector c, WideVector d) const {
    return hn::Add(hn::Add(a, b), hn::Add(c, d));
  }
};
struct SquareSum : Sum {
  HWY_INLINE WideVector operator()(WideVector sum, WideVector x) const { return hn::MulAdd(x, x, sum); }
};

double norm(const float* vector, int count, double p) {
  const Doubles doubles;
  if (p == 1.0) return hn::GetLane(hn::SumOfLanes(doubles, fold_vector(vector, count, Sum())));
  if (p == 2.0) return std::sqrt(hn::GetLane(hn::SumOfLanes(doubles, fold_vector(vector, count, SquareSum()))));
  if (std::isinf(p)) {
    // A maximum may lose what is not a number; a sum does not.
    const double sum = norm(vector, count, 1.0);
    return std::isfinite(sum) ? hn::GetLane(hn::MaxOfLanes(doubles, fold_vector(vector, count, Largest()))) : sum;
  }
  double sum = 0.0;
  for (int i = 0; i < count; ++i) sum += std::pow(std::abs(static_cast<double>(vector[i])), p);
  return std::pow(sum, 1.0 / p);
}

void scale(float* vectors_in, int count, int dim, const double* factors) {
  const Doubles doubles;
  const HalfFloats halves;
  for (int r = 0; r < count; ++r) {
    float* vector = vectors_in + at(r, dim);
    int c = 0;
    for (; c + wide_lanes <= dim; c += wide_lanes) {
      const WideVector wide = hn::PromoteTo(doubles, hn::LoadU(halves, vector + c));
      hn::StoreU(hn::DemoteTo(halves, hn::Mul(wide, hn::Set(doubles, factors[r]))), halves, vector + c);
    }
    for (; c < dim; ++c) vector[c] = static_cast<float>(static_cast<double>(vector[c]) * factors[r]);
  }
}

/// out[c, r] = in[r, c] for a 4 x 4 square of 32-bit words.
template <class Word>
HWY_INLINE void turn_square(const Word* in, std::ptrdiff_t in_stride, Word* out, std::ptrdiff_t out_stride) {
#if HWY_TARGET == HWY_SCALAR
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) out[c * out_stride + r] = in[r * in_stride + c];
#else
  const hn::FixedTag<Word, 4> four;
  const hn::RepartitionToWide<hn::RebindToUnsigned<decltype(four)> > pairs;
  const auto a = hn::LoadU(four, in);
  const auto b = hn::LoadU(four, in + in_stride);
  const auto c = hn::LoadU(four, in + 2 * in_stride);
  const auto d = hn::LoadU(four, in + 3 * in_stride);
  const auto ab_low = hn::BitCast(pairs, hn::InterleaveLower(four, a, b));  // a0 b0 a1 b1
  const auto cd_low = hn::BitCast(pairs, hn::InterleaveLower(four, c, d));
  const auto ab_high = hn::BitCast(pairs, hn::InterleaveUpper(four, a, b));
  const auto cd_high = hn::BitCast(pairs, hn::InterleaveUpper(four, c, d));
  hn::StoreU(hn::BitCast(four, hn::InterleaveLower(pairs, ab_low, cd_low)), four, out);
  hn::StoreU(hn::BitCast(four, hn::InterleaveUpper(pairs, ab_low, cd_low)), four, out + out_stride);
  hn::StoreU(hn::BitCast(four, hn::InterleaveLower(pairs, ab_high, cd_high)), four, out + 2 * out_stride);
  hn::StoreU(hn::BitCast(four, hn::InterleaveUpper(pairs, ab_high, cd_high)), four, out + 3 * out_stride);
#endif
}

void pack(const float* vectors_in, int count, int dim, int width, float* out) {
  const int whole_rows = count / 4 * 4;
  const int whole_columns = dim / 4 * 4;
  for (int c = 0; c < whole_columns; c += 4)
    for (int r = 0; r < whole_rows; r += 4)
      turn_square(vectors_in + at(r, dim) + c, dim, out + at(c, width) + r, width);
  for (int c = 0; c < dim; ++c) {
    float* row = out + at(c, width);
    for (int r = c < whole_columns ? whole_rows : 0; r < count; ++r) row[r] = vectors_in[at(r, dim) + c];
    for (int r = count; r < width; ++r) row[r] = 0.0F;
  }
}

void pack_pairs(const float* vectors_in, int count, int dim, int width, float* out) {
  constexpr int most_words = 256;  // turned at a time
  float words[4 * most_words];
  const Floats floats;
  const hn::RebindToUnsigned<Floats> bits;
  const int all_words = (dim + 1) / 2;
  for (int r = 0; r < width; r += 4) {
    const int rows = HWY_MAX(0, HWY_MIN(4, count - r));
    for (int begin = 0; begin < all_words; begin += most_words) {
      const int some = HWY_MIN(most_words, all_words - begin);
      for (int i = 0; i < 4; ++i) {
        float* word = words + at(i, most_words);
        if (i >= rows) {
          for (int c = 0; c < some; ++c) word[c] = 0.0F;
          continue;
        }
        const float* numbers = vectors_in + at(r + i, dim) + 2 * begin;
        const int rest = dim - 2 * begin;  // numbers from here on
        int c = 0;
        for (; c + lanes <= some && 2 * (c + lanes) <= rest; c += lanes) {
          Vector even, odd;
          hn::LoadInterleaved2(floats, numbers + 2 * c, even, odd);
          const auto low = hn::ShiftRight<16>(hn::BitCast(bits, even));
          const auto high = hn::And(hn::BitCast(bits, odd), hn::Set(bits, 0xFFFF0000u));
          hn::StoreU(hn::BitCast(floats, hn::Or(low, high)), floats, word + c);
        }
        for (; c < some; ++c) {
          const auto low = std::bit_cast<std::uint32_t>(numbers[2 * c]) >> 16;
          const auto high = 2 * c + 1 < rest ? std::bit_cast<std::uint32_t>(numbers[2 * c + 1]) & 0xFFFF0000u : 0u;
          word[c] = std::bit_cast<float>(low | high);
        }
      }
      int c = 0;
      if (r + 4 <= width)
        for (; c + 4 <= some; c += 4) turn_square(words + c, most_words, out + at(begin + c, width) + r, width);
      for (; c < some; ++c)
        for (int i = 0; i < HWY_MIN(4, width - r); ++i)
          out[at(begin + c, width) + r + i] = words[at(i, most_words) + c];
    }
  }
}

// ---- products

/// sums = products of the chunk and of those before it.
template <class Product>
HWY_INLINE void multiply_chunk(const CosineChunk& chunk, Vector (&sums)[tile_rows][vectors]) {
  const Floats floats;
  clear(floats, sums);
  multiply<Product>(floats, chunk.panel, chunk.tile, chunk.words, sums);
  if (chunk.first) return;
#pragma GCC unroll 16
  for (int r = 0; r < tile_rows; ++r) {
    sums[r][0] = hn::Add(hn::Load(floats, chunk.sums + r * tile_columns), sums[r][0]);
    sums[r][1] = hn::Add(hn::Load(floats, chunk.sums + r * tile_columns + lanes), sums[r][1]);
  }
}

template <class Product>
HWY_NOINLINE void add_products(const CosineChunk& chunk) {
  Vector sums[tile_rows][vectors];
  multiply_chunk<Product>(chunk, sums);
  store(Floats(), sums, chunk.sums);
}

/// Every row sees all columns.
template <class Product>
HWY_NOINLINE void raise_all_maxima(const CosineChunk& chunk, const CosineMaxima& maxima) {
  const Floats floats;
  Vector sums[tile_rows][vectors];
  multiply_chunk<Product>(chunk, sums);
  const Vector scales0 = hn::LoadU(floats, maxima.column_scales);
  const Vector scales1 = hn::LoadU(floats, maxima.column_scales + lanes);
  Vector column0 = hn::LoadU(floats, maxima.column_maxima);
  Vector column1 = hn::LoadU(floats, maxima.column_maxima + lanes);
#pragma GCC unroll 16
  for (int r = 0; r < tile_rows; ++r) {
    const Vector scales = hn::Set(floats, maxima.row_scales[r]);
    float* row = maxima.row_maxima + r * lanes;
    const Vector highest = hn::Max(hn::Mul(sums[r][0], scales0), hn::Mul(sums[r][1], scales1));
    hn::Store(hn::Max(highest, hn::Load(floats, row)), floats, row);
    column0 = hn::Max(hn::Mul(sums[r][0], scales), column0);
    column1 = hn::Max(hn::Mul(sums[r][1], scales), column1);
  }
  hn::StoreU(column0, floats, maxima.column_maxima);
  hn::StoreU(column1, floats, maxima.column_maxima + lanes);
}

template <class Product>
HWY_NOINLINE void raise_some_maxima(const CosineChunk& chunk, const CosineMaxima& maxima) {
  const Floats floats;
  HWY_ALIGN float sums[tile_rows * tile_columns];
  CosineChunk stored = chunk;
  if (!chunk.first)
    for (int i = 0; i < tile_rows * tile_columns; ++i) sums[i] = chunk.sums[i];
  stored.sums = sums;
  add_products<Product>(stored);
  const Vector lowest = hn::Set(floats, below_any_cosine);
  for (int r = 0; r < maxima.row_count; ++r) {
    const Vector scale = hn::Set(floats, maxima.row_scales[r]);
    float* row = maxima.row_maxima + r * lanes;
    for (int v = 0; v < tile_columns; v += lanes) {
      const int seen = HWY_MAX(0, HWY_MIN(lanes, maxima.seen + r - v));
      const auto mask = hn::FirstN(floats, static_cast<std::size_t>(seen));
      const Vector sum = hn::Load(floats, sums + r * tile_columns + v);
      const Vector of_row = hn::Mul(sum, hn::LoadU(floats, maxima.column_scales + v));
      float* column = maxima.column_maxima + v;
      hn::Store(hn::Max(hn::IfThenElse(mask, of_row, lowest), hn::Load(floats, row)), floats, row);
      hn::StoreU(hn::Max(hn::IfThenElse(mask, hn::Mul(sum, scale), lowest), hn::LoadU(floats, column)), floats, column);
    }
  }
}

template <class Product>
void raise_maxima(const CosineChunk& chunk, const CosineMaxima& maxima) {
  const bool all = maxima.seen >= tile_columns && maxima.row_count == tile_rows;
  (all ? raise_all_maxima<Product> : raise_some_maxima<Product>)(chunk, maxima);
}

// ---- similarities

void pack_wide(const double* vectors_in, int count, int dim, int width, double* out, double* scales) {
  const Doubles doubles;
  for (int c = 0; c < dim; ++c) {
    double* row = out + at(c, width);
    for (int r = 0; r < count; ++r) row[r] = vectors_in[at(r, dim) + c];
    for (int r = count; r < width; ++r) row[r] = 0.0;
  }
  for (int r = 0; r < width; r += wide_lanes) {
    WideVector square = hn::Zero(doubles);
    for (int c = 0; c < dim; ++c) {
      const WideVector x = hn::Load(doubles, out + at(c, width) + r);
      square = hn::Add(square, hn::Mul(x, x));
    }
    const WideVector length = hn::Sqrt(square);
    const auto some = hn::Gt(length, hn::Zero(doubles));
    hn::StoreU(hn::IfThenElseZero(some, hn::Div(hn::Set(doubles, 0x1p15), length)), doubles, scales + r);
  }
}

template <class Product>
HWY_INLINE void multiply_chunk(const WideChunk& chunk, WideVector (&sums)[tile_rows][vectors]) {
  const Doubles doubles;
#pragma GCC unroll 16
  for (int r = 0; r < tile_rows; ++r) {
    sums[r][0] = chunk.first ? hn::Zero(doubles) : hn::Load(doubles, chunk.sums + r * wide_tile_columns);
    sums[r][1] = chunk.first ? hn::Zero(doubles) : hn::Load(doubles, chunk.sums + r * wide_tile_columns + wide_lanes);
  }
  multiply<Product>(doubles, chunk.panel, chunk.tile, chunk.dims, sums);
}

template <class Product>
HWY_NOINLINE void add_wide(const WideChunk& chunk) {
  WideVector sums[tile_rows][vectors];
  multiply_chunk<Product>(chunk, sums);
  store(Doubles(), sums, chunk.sums);
}

void add_wide_products(const WideChunk& chunk) {
  (chunk.of_floats ? add_wide<FusedProduct> : add_wide<SeparateProduct>)(chunk);
}

/// rint(x) for |x| < 2^31, found in the low bits of a sum.
HWY_INLINE hn::Vec<HalfIntegers> round_to_integers(WideVector x) {
  const hn::RebindToUnsigned<Longs> bits;
  const hn::RebindToUnsigned<HalfIntegers> halves;
  const WideVector sum = hn::Add(x, hn::Set(Doubles(), 0x1.8p52));
  return hn::BitCast(HalfIntegers(), hn::TruncateTo(halves, hn::BitCast(bits, sum)));
}

template <class Product>
HWY_NOINLINE void store_rows(const WideChunk& chunk, const double* row_scales, const double* column_scales,
                             std::size_t stride, std::int32_t* out) {
  const Doubles doubles;
  const HalfIntegers halves;
  WideVector sums[tile_rows][vectors];
  multiply_chunk<Product>(chunk, sums);
  const WideVector scales0 = hn::LoadU(doubles, column_scales);
  const WideVector scales1 = hn::LoadU(doubles, column_scales + wide_lanes);
#pragma GCC unroll 16
  for (int r = 0; r < tile_rows; ++r) {
    const WideVector scale_of_row = hn::Set(doubles, row_scales[r]);
    std::int32_t* row = out + static_cast<std::size_t>(r) * stride;
    hn::StoreU(round_to_integers(hn::Mul(sums[r][0], hn::Mul(scale_of_row, scales0))), halves, row);
    hn::StoreU(round_to_integers(hn::Mul(sums[r][1], hn::Mul(scale_of_row, scales1))), halves, row + wide_lanes);
  }
}

void store_similarities(const WideChunk& chunk, const double* row_scales, const double* column_scales,
                        std::size_t stride, std::int32_t* out, std::int32_t* turned) {
  (chunk.of_floats ? store_rows<FusedProduct> : store_rows<SeparateProduct>)(chunk, row_scales, column_scales, stride,
                                                                             out);
  if (turned == nullptr) return;
  const auto step = static_cast<std::ptrdiff_t>(stride);
  constexpr int whole_rows = tile_rows / 4 * 4;
  constexpr int whole_columns = wide_tile_columns / 4 * 4;
  for (int c = 0; c < whole_columns; c += 4)
    for (int r = 0; r < whole_rows; r += 4) turn_square(out + r * step + c, step, turned + c * step + r, step);
  for (int c = 0; c < wide_tile_columns; ++c)
    for (int r = c < whole_columns ? whole_rows : 0; r < tile_rows; ++r) turned[c * step + r] = out[r * step + c];
}

// ---- redundancy

int find_raised(const std::int32_t* row, const std::int32_t* red, int tokens, std::int32_t* found) {
  const Integers integers;
  int count = 0;
  for (int begin = 0; begin < tokens; begin += lanes) {
    const auto raised = hn::Gt(hn::LoadU(integers, row + begin), hn::LoadU(integers, red + begin));
    if (HWY_LIKELY(hn::AllFalse(integers, raised))) continue;
    for (int token = begin; token < HWY_MIN(begin + lanes, tokens); ++token)
      if (row[token] > red[token]) found[count++] = token;
  }
  return count;
}

/// clamp(S, low, high) - low is below 2^32 and not negative.
HWY_INLINE hn::Vec<Longs> excess_of(const ExcessTerm& term, int token) {
  const HalfIntegers halves;
  const auto low = hn::Set(halves, term.low);
  const auto s = hn::Min(hn::Max(hn::LoadU(halves, term.row + token), low), hn::Set(halves, term.high));
  const auto distance = hn::BitCast(hn::RebindToUnsigned<HalfIntegers>(), hn::Sub(s, low));
  return hn::BitCast(Longs(), hn::PromoteTo(hn::RebindToUnsigned<Longs>(), distance));
}

int redundancy_step(const RedundancyStep* parts, int count, int tokens, bool greatest, std::int64_t* excess) {
  const Longs longs;
  const HalfIntegers halves;
  using LongVector = hn::Vec<Longs>;
  const LongVector sign = hn::Set(longs, greatest ? -1 : 0);  // (x ^ -1) - -1 = -x
  LongVector least = hn::Set(longs, INT64_MAX);
  LongVector where = hn::Zero(longs);
  LongVector number = hn::Iota(longs, 0);
  for (int token = 0; token < tokens; token += wide_lanes) {
    LongVector sum = hn::Load(longs, excess + token);
    LongVector all_highest = hn::Zero(longs);
    for (int i = 0; i < count; ++i) {
      const RedundancyStep& part = parts[i];
      for (int term = 0; term < part.added_count; ++term) sum = hn::Add(sum, excess_of(part.added[term], token));
      for (int term = 0; term < part.removed_count; ++term) sum = hn::Sub(sum, excess_of(part.removed[term], token));
      auto highest = hn::LoadU(halves, part.highest + token);
      if (part.joining != nullptr) {
        highest = hn::Max(highest, hn::LoadU(halves, part.joining + token));
        hn::StoreU(highest, halves, part.highest + token);
      }
      all_highest = hn::Add(all_highest, hn::PromoteTo(longs, highest));
    }
    hn::Store(sum, longs, excess + token);
    const LongVector redundancy = hn::Sub(hn::Xor(hn::Add(sum, all_highest), sign), sign);
    const auto lower = hn::Lt(redundancy, least);
    least = hn::IfThenElse(lower, redundancy, least);
    where = hn::IfThenElse(lower, number, where);
    number = hn::Add(number, hn::Set(longs, wide_lanes));
  }
  HWY_ALIGN std::int64_t values[wide_lanes];
  HWY_ALIGN std::int64_t numbers[wide_lanes];
  hn::Store(least, longs, values);
  hn::Store(where, longs, numbers);
  int best = 0;
  for (int lane = 1; lane < wide_lanes; ++lane) {
    if (values[lane] < values[best] || (values[lane] == values[best] && numbers[lane] < numbers[best])) best = lane;
  }
  return static_cast<int>(numbers[best]);
}

}  // namespace

const SimilarityKernels& similarity_table() {
  static const SimilarityKernels table{
      .rows = tile_rows,
      .columns = tile_columns,
      .wide_columns = wide_tile_columns,
      .lanes = lanes,
      .norm = norm,
      .scale = scale,
      .pack = pack,
      .pack_pairs = pack_pairs,
      .add_products = add_products<FusedProduct>,
      .raise_maxima = raise_maxima<FusedProduct>,
#if KVREPLAY_AVX512
      .add_pair_products = add_products<PairProduct>,
      .raise_pair_maxima = raise_maxima<PairProduct>,
#else
      .add_pair_products = nullptr,
      .raise_pair_maxima = nullptr,
#endif
      .pack_wide = pack_wide,
      .add_wide_products = add_wide_products,
      .store_similarities = store_similarities,
      .find_raised = find_raised,
      .redundancy_step = redundancy_step,
  };
  return table;
}

}  // namespace HWY_NAMESPACE
}  // namespace kvreplay
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvreplay {

HWY_EXPORT(similarity_table);

const SimilarityKernels& similarity_kernels() {
  simd_level();
  return HWY_DYNAMIC_DISPATCH(similarity_table)();
}

}  // namespace kvreplay
#endif
