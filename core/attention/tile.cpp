#include "attention/tile.h"

#include <cmath>
#include <cstring>

#include "attention/simd_level.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/tile.cpp"
#include <hwy/foreach_target.h>
// Highway's order: its own headers come after foreach_target.h, in every pass over this file.
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace kvreplay {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Integers = hn::RebindToSigned<Floats>;
using Vector = hn::Vec<Floats>;
using Doubles = hn::ScalableTag<double>;
using IntegerVector = hn::Vec<Integers>;

constexpr int lanes = static_cast<int>(hn::MaxLanes(Floats()));
// Accumulators, two vectors of keys and one broadcast fill the 32 registers of AVX-512, or the 16 of the others.
constexpr int vectors = 2;
constexpr int tile_rows = lanes >= 16 ? 12 : 6;
constexpr int tile_keys = vectors * lanes;
constexpr int tile_size = tile_rows * tile_keys;
constexpr int wide_lanes = static_cast<int>(hn::MaxLanes(Doubles()));
constexpr int wide_tile_keys = vectors * wide_lanes;
static_assert(tile_rows <= WeightSums::most_rows);

constexpr float round_magic = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, found in the low bits
constexpr std::int32_t round_magic_bits = 0x4B400000;
constexpr float fast_range = 2097152.0F;  // 2^21: references up to here, and logits down to twice it, round exactly
constexpr float headroom = 60.0F;         // p up to 2^60: row sums of 2^60 keys' worth still fit into float32
constexpr std::int32_t lowest_exponent = -110;  // below it p counts as 0, and never becomes denormal

HWY_INLINE Vector splat(float x) { return hn::Set(Floats(), x); }
HWY_INLINE IntegerVector splat(std::int32_t x) { return hn::Set(Integers(), x); }

/// 2^f for |f| <= 1/2, relative error 1e-7 (minimax of degree 5).
HWY_INLINE Vector power_of_two(Vector f) {
  Vector p = hn::MulAdd(splat(0.00132764725F), f, splat(0.00967554189F));
  p = hn::MulAdd(p, f, splat(0.0555071309F));
  p = hn::MulAdd(p, f, splat(0.240221202F));
  p = hn::MulAdd(p, f, splat(0.693146944F));
  return hn::MulAdd(p, f, splat(1.0F));
}

HWY_INLINE Vector scale_by_exponent(Vector p, IntegerVector exponent) {
  const Vector scaled = hn::BitCast(Floats(), hn::Add(hn::BitCast(Integers(), p), hn::ShiftLeft<23>(exponent)));
  return hn::IfThenElseZero(hn::RebindMask(Floats(), hn::Gt(exponent, splat(lowest_exponent))), scaled);
}

/// 2^(x - R) for settled references; `highest` collects the exponents. The maximum keeps the magic sum positive.
HWY_INLINE Vector fast_exponential(Vector x, IntegerVector reference, IntegerVector& highest) {
  const Vector bounded = hn::Max(splat(-2.0F * fast_range), x);
  const Vector sum = hn::Add(bounded, splat(round_magic));
  const Vector fraction = hn::Sub(bounded, hn::Sub(sum, splat(round_magic)));
  const IntegerVector exponent = hn::Sub(hn::BitCast(Integers(), sum), reference);
  highest = hn::Max(highest, exponent);
  return scale_by_exponent(power_of_two(fraction), exponent);
}

/// The same bits where both apply, for any finite x and reference.
HWY_INLINE Vector exponential(Vector x, Vector reference) {
  const Vector whole = hn::Round(x);
  const Vector distance = hn::Min(hn::Max(hn::Sub(whole, reference), splat(-200.0F)), splat(100.0F));
  return scale_by_exponent(power_of_two(hn::Sub(x, whole)), hn::ConvertTo(Integers(), distance));
}

/// Operands that lie one k after the other.
struct Packed {
  const float* rows;
  const float* keys;
  const float* row(int k) const { return rows + static_cast<std::ptrdiff_t>(k) * tile_rows; }
  const float* key(int k) const { return keys + static_cast<std::ptrdiff_t>(k) * tile_keys; }
};

/// Operands wherever they lie: k counts terms.
struct Scattered {
  const WeightedKey* terms;
  std::ptrdiff_t weights_offset;
  std::ptrdiff_t values_offset;
  const float* row(int k) const { return terms[k].weights + weights_offset; }
  const float* key(int k) const { return terms[k].values + values_offset; }
};

/// sums[r][v] = Σ_k row(k)[r] * key(k)[v], in registers: every index of `sums` is a constant once unrolled.
template <class Operands>
HWY_INLINE void multiply(const Operands& operands, int depth, Vector (&sums)[tile_rows][vectors]) {
  const Floats floats;
#pragma GCC unroll 16
  for (int r = 0; r < tile_rows; ++r) sums[r][0] = sums[r][1] = hn::Zero(floats);
#pragma GCC unroll 2
  for (int k = 0; k < depth; ++k) {
    const float* row = operands.row(k);
    const Vector key0 = hn::Load(floats, operands.key(k));
    const Vector key1 = hn::Load(floats, operands.key(k) + lanes);
#pragma GCC unroll 16
    for (int r = 0; r < tile_rows; ++r) {
      const Vector broadcast = hn::Set(floats, row[r]);
      sums[r][0] = hn::MulAdd(broadcast, key0, sums[r][0]);
      sums[r][1] = hn::MulAdd(broadcast, key1, sums[r][1]);
    }
  }
}

template <class Operands>
HWY_INLINE void multiply_into(const Operands& operands, int depth, float* out) {
  const Floats floats;
  Vector sums[tile_rows][vectors];
  multiply(operands, depth, sums);
#pragma GCC unroll 16
  for (int r = 0; r < tile_rows; ++r) {
    hn::Store(sums[r][0], floats, out + r * tile_keys);
    hn::Store(sums[r][1], floats, out + r * tile_keys + lanes);
  }
}

std::ptrdiff_t piece_offset(const TileBlock& block, int tile, int panel) {
  return (static_cast<std::ptrdiff_t>(tile - block.first_tile) * block.panels + panel) * tile_size;
}

const float* panel_queries(const TileBlock& block, int panel) {
  return block.queries + static_cast<std::ptrdiff_t>(panel) * block.dim * tile_rows;
}

/// A tile that all rows of the panel see whole, with settled references: everything stays in registers.
HWY_NOINLINE bool fast_exponentials(const TileBlock& block, const float* keys, int tile, int panel) {
  const Floats floats;
  Vector sums[tile_rows][vectors];
  multiply(Packed{panel_queries(block, panel), keys}, block.dim, sums);

  float* p = block.exponentials + piece_offset(block, tile, panel);
  const std::int32_t* exponent = block.exponent + panel * tile_rows;
  IntegerVector highest = splat(0);
#pragma GCC unroll 16
  for (int r = 0; r < tile_rows; ++r) {
    const IntegerVector reference = splat(exponent[r] + round_magic_bits);
    const Vector p0 = fast_exponential(sums[r][0], reference, highest);
    const Vector p1 = fast_exponential(sums[r][1], reference, highest);
    hn::Store(p0, floats, p + r * tile_keys);
    hn::Store(p1, floats, p + r * tile_keys + lanes);
    sums[r][0] = hn::Add(p0, p1);
  }
  if (!hn::AllFalse(Integers(), hn::Gt(highest, splat(static_cast<std::int32_t>(headroom))))) return false;

  float* lane_sums = block.lane_sums + static_cast<std::ptrdiff_t>(panel) * tile_size;
#pragma GCC unroll 16
  for (int r = 0; r < tile_rows; ++r) {
    hn::Store(hn::Add(hn::Load(floats, lane_sums + r * tile_keys), sums[r][0]), floats, lane_sums + r * tile_keys);
  }
  return true;
}

HWY_NOINLINE void tile_logits(const TileBlock& block, const float* keys, int panel, float* x) {
  const Floats floats;
  multiply_into(Packed{panel_queries(block, panel), keys}, block.dim, x);
  if (block.cap == 0.0F) return;
  for (int i = 0; i < tile_size; i += lanes) {
    hn::Store(hn::Mul(splat(block.cap), hn::Tanh(floats, hn::Load(floats, x + i))), floats, x + i);
  }
}

HWY_INLINE hn::Mask<Floats> visible(const TileBlock& block, int row, int key) {
  const IntegerVector number = hn::Iota(Integers(), key);
  const auto begun = hn::Gt(number, splat(block.first[row] - 1));
  return hn::RebindMask(Floats(), hn::And(begun, hn::Lt(number, splat(block.end[row]))));
}

/// ceil of the largest x that the row sees; -infinity where it sees none, NaN where it sees one.
HWY_INLINE float row_reference(const TileBlock& block, int row, int first_key, const float* x) {
  const Floats floats;
  const Vector lowest = splat(-HUGE_VALF);
  Vector highest = lowest;
  for (int v = 0; v < tile_keys; v += lanes) {
    const Vector seen = hn::IfThenElse(visible(block, row, first_key + v), hn::Load(floats, x + v), lowest);
    if (!hn::AllFalse(floats, hn::IsNaN(seen))) return NAN;
    highest = hn::Max(highest, seen);
  }
  return std::ceil(hn::GetLane(hn::MaxOfLanes(floats, highest)));
}

void settle(const TileBlock& block, int panel) {
  bool settled = true;
  for (int row = panel * tile_rows; row < (panel + 1) * tile_rows; ++row) {
    const bool in_range = std::abs(block.reference[row]) <= fast_range;  // false for the -infinity of an unset one
    block.exponent[row] = in_range ? static_cast<std::int32_t>(block.reference[row]) : 0;
    settled = settled && in_range;
  }
  block.settled[panel] = settled;
}

/// Any tile: masks, softcap, references set where a row sees its first key, logits kept if wanted.
HWY_NOINLINE bool masked_exponentials(const TileBlock& block, const float* keys, int tile, int panel) {
  const Floats floats;
  HWY_ALIGN float x[tile_size];
  tile_logits(block, keys, panel, x);
  float* p = block.exponentials + piece_offset(block, tile, panel);
  float* kept_logits = block.logits == nullptr ? nullptr : block.logits + piece_offset(block, tile, panel);
  float* lane_sums = block.lane_sums + static_cast<std::ptrdiff_t>(panel) * tile_size;
  const int first_key = tile * tile_keys;
  for (int r = 0; r < tile_rows; ++r) {
    const int row = panel * tile_rows + r;
    const float highest = row_reference(block, row, first_key, x + r * tile_keys);
    float& reference = block.reference[row];
    if (reference == -HUGE_VALF) reference = highest;
    if (!(highest <= reference + headroom) || reference == HUGE_VALF) return false;
    Vector sum = hn::Zero(floats);
    for (int v = r * tile_keys; v < (r + 1) * tile_keys; v += lanes) {
      const auto seen = visible(block, row, first_key + v - r * tile_keys);
      const Vector logits = hn::Load(floats, x + v);
      const Vector exponentials = hn::IfThenElseZero(seen, exponential(logits, splat(reference)));
      hn::Store(exponentials, floats, p + v);
      sum = hn::Add(sum, exponentials);
      if (kept_logits != nullptr) hn::Store(hn::IfThenElseZero(seen, logits), floats, kept_logits + v);
    }
    hn::Store(hn::Add(hn::Load(floats, lane_sums + r * tile_keys), sum), floats, lane_sums + r * tile_keys);
  }
  if (!block.settled[panel]) settle(block, panel);
  return true;
}

bool exponentials(const TileBlock& block, const float* keys, int tile) {
  const bool plain = block.cap == 0.0F && block.logits == nullptr;
  const int first_key = tile * tile_keys;
  for (int panel = 0; panel < block.panels; ++panel) {
    if (!block.ranges[panel].sees_some(first_key, first_key + tile_keys)) continue;
    const bool whole = plain && block.settled[panel] && block.ranges[panel].sees_all(first_key, first_key + tile_keys);
    if (!(whole ? fast_exponentials : masked_exponentials)(block, keys, tile, panel)) return false;
  }
  return true;
}

void raise_references(const TileBlock& block, const float* keys, int tile) {
  HWY_ALIGN float x[tile_size];
  const int first_key = tile * tile_keys;
  for (int panel = 0; panel < block.panels; ++panel) {
    if (!block.ranges[panel].sees_some(first_key, first_key + tile_keys)) continue;
    tile_logits(block, keys, panel, x);
    for (int r = 0; r < tile_rows; ++r) {
      const int row = panel * tile_rows + r;
      const float highest = row_reference(block, row, first_key, x + r * tile_keys);
      if (!(highest <= block.reference[row])) block.reference[row] = highest;
    }
    settle(block, panel);
  }
}

void fold_row_sums(const TileBlock& block) {
  for (int row = 0; row < block.panels * tile_rows; ++row) {
    float* lane_sums = block.lane_sums + static_cast<std::ptrdiff_t>(row) * tile_keys;
    double sum = 0.0;
    for (int lane = 0; lane < lanes; ++lane) {
      sum += static_cast<double>(lane_sums[lane]);
      lane_sums[lane] = 0.0F;
    }
    block.row_sums[row] += sum;
  }
}

void add_columns(const TileBlock& block, int tile, int begin, int end, const float* factors, double* columns) {
  const Floats floats;
  const int first_key = tile * tile_keys;
  Vector sums[2][vectors] = {{hn::Zero(floats), hn::Zero(floats)}, {hn::Zero(floats), hn::Zero(floats)}};
  for (int panel = begin / tile_rows; panel * tile_rows < end; ++panel) {
    if (!block.ranges[panel].sees_some(first_key, first_key + tile_keys)) continue;
    const float* p = block.exponentials + piece_offset(block, tile, panel);
    const int from = begin > panel * tile_rows ? begin - panel * tile_rows : 0;
    const int to = end < (panel + 1) * tile_rows ? end - panel * tile_rows : tile_rows;
    const float* panel_factors = factors + panel * tile_rows;
    const auto add_row = [&](int r, Vector(&into)[vectors]) HWY_ATTR {
      const Vector factor = splat(panel_factors[r]);
      into[0] = hn::MulAdd(factor, hn::Load(floats, p + r * tile_keys), into[0]);
      into[1] = hn::MulAdd(factor, hn::Load(floats, p + r * tile_keys + lanes), into[1]);
    };
    int r = from;
    for (; r + 1 < to; r += 2) {
      add_row(r, sums[0]);
      add_row(r + 1, sums[1]);
    }
    if (r < to) add_row(r, sums[0]);
  }
  HWY_ALIGN float total[tile_keys];
  hn::Store(hn::Add(sums[0][0], sums[1][0]), floats, total);
  hn::Store(hn::Add(sums[0][1], sums[1][1]), floats, total + lanes);
  for (int key = 0; key < tile_keys; ++key) columns[key] += static_cast<double>(total[key]);
}

void turn_key_major(const TileBlock& block, int tile, float* values) {
  const int first_key = tile * tile_keys;
  HWY_ALIGN float row_major[tile_size];
  for (int panel = 0; panel < block.panels; ++panel) {
    float* piece = values + piece_offset(block, tile, panel);
    if (!block.ranges[panel].sees_some(first_key, first_key + tile_keys)) {
      for (int i = 0; i < tile_size; ++i) piece[i] = 0.0F;
      continue;
    }
    for (int i = 0; i < tile_size; ++i) row_major[i] = piece[i];
    for (int key = 0; key < tile_keys; ++key)
      for (int r = 0; r < tile_rows; ++r) piece[key * tile_rows + r] = row_major[r * tile_keys + key];
  }
}

void add_weighted_values(const WeightedKey* terms, int count, int panel, int dim, double* out) {
  HWY_ALIGN float sums[tile_size];
  for (int column = 0; column < dim; column += tile_keys) {
    multiply_into(Scattered{terms, static_cast<std::ptrdiff_t>(panel) * tile_size, column}, count, sums);
    for (int r = 0; r < tile_rows; ++r)
      for (int c = 0; c < tile_keys; ++c)
        out[static_cast<std::ptrdiff_t>(r) * dim + column + c] += static_cast<double>(sums[r * tile_keys + c]);
  }
}

void add_weights(const WeightedKey* terms, int count, int panel, WeightSums& sums) {
  const std::ptrdiff_t offset = static_cast<std::ptrdiff_t>(panel) * tile_size;
  WeightSums local = sums;
  for (int i = 0; i < count; ++i) {
    const float* weights = terms[i].weights + offset;
    const float* logits = terms[i].logits + offset;
    const float* unaligned = terms[i].unaligned + offset;
    for (int r = 0; r < tile_rows; ++r) {
      const double weight = static_cast<double>(weights[r]);
      const double logit = static_cast<double>(logits[r]);
      local.weight[r] += weight;
      local.square[r] += weight * weight;
      local.logit_square[r] += logit * logit;
      local.unaligned_dot[r] += weight * static_cast<double>(unaligned[r]);
    }
  }
  sums = local;
}

void products(const float* panel, const float* tile, int dim, float* out) {
  multiply_into(Packed{panel, tile}, dim, out);
}

void wide_products(const double* panel, const double* tile, int dim, double* out) {
  const Doubles doubles;
  hn::Vec<Doubles> sums[tile_rows][vectors];
#pragma GCC unroll 16
  for (int r = 0; r < tile_rows; ++r) sums[r][0] = sums[r][1] = hn::Zero(doubles);
  for (int k = 0; k < dim; ++k) {
    const double* row = panel + static_cast<std::ptrdiff_t>(k) * tile_rows;
    const double* key = tile + static_cast<std::ptrdiff_t>(k) * wide_tile_keys;
    const auto key0 = hn::Load(doubles, key);
    const auto key1 = hn::Load(doubles, key + wide_lanes);
#pragma GCC unroll 16
    for (int r = 0; r < tile_rows; ++r) {
      const auto broadcast = hn::Set(doubles, row[r]);
      sums[r][0] = hn::Add(sums[r][0], hn::Mul(broadcast, key0));
      sums[r][1] = hn::Add(sums[r][1], hn::Mul(broadcast, key1));
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < tile_rows; ++r) {
    hn::Store(sums[r][0], doubles, out + r * wide_tile_keys);
    hn::Store(sums[r][1], doubles, out + r * wide_tile_keys + wide_lanes);
  }
}

void widen(const std::byte* source, DType type, int count, float* out) {
  const Floats floats;
  if (type == DType::float32) {
    std::memcpy(out, source, static_cast<std::size_t>(count) * sizeof(float));
    return;
  }
  const hn::Rebind<std::uint16_t, Floats> halves;
  // Copied first: elements of a file may lie at odd addresses.
  const auto widen_lanes = [&](const std::byte* from) HWY_ATTR {
    HWY_ALIGN std::uint16_t copied[lanes];
    std::memcpy(copied, from, sizeof copied);
    const auto bits = hn::Load(halves, copied);
    if (type == DType::bfloat16) {
      return hn::BitCast(floats, hn::ShiftLeft<16>(hn::PromoteTo(hn::RebindToUnsigned<Floats>(), bits)));
    }
    return hn::PromoteTo(floats, hn::BitCast(hn::Rebind<hwy::float16_t, Floats>(), bits));
  };
  constexpr int element = sizeof(std::uint16_t);
  int i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(widen_lanes(source + i * element), floats, out + i);
  if (i < count) {
    std::byte rest[lanes * element] = {};
    HWY_ALIGN float wide[lanes];
    std::memcpy(rest, source + i * element, static_cast<std::size_t>(count - i) * element);
    hn::Store(widen_lanes(rest), floats, wide);
    std::memcpy(out + i, wide, static_cast<std::size_t>(count - i) * sizeof(float));
  }
}

template <class Number>
void pack(const Number* vectors_in, int count, int dim, int width, Number* out) {
  for (int c = 0; c < dim; ++c) {
    Number* row = out + static_cast<std::ptrdiff_t>(c) * width;
    for (int r = 0; r < count; ++r) row[r] = vectors_in[static_cast<std::ptrdiff_t>(r) * dim + c];
    for (int r = count; r < width; ++r) row[r] = 0;
  }
}

}  // namespace

const TileKernels& kernels() {
  static const TileKernels table{
      .rows = tile_rows,
      .keys = tile_keys,
      .wide_keys = wide_tile_keys,
      .widen = widen,
      .pack = pack<float>,
      .wide_pack = pack<double>,
      .exponentials = exponentials,
      .raise_references = raise_references,
      .fold_row_sums = fold_row_sums,
      .add_columns = add_columns,
      .turn_key_major = turn_key_major,
      .add_weighted_values = add_weighted_values,
      .add_weights = add_weights,
      .products = products,
      .wide_products = wide_products,
  };
  return table;
}

}  // namespace HWY_NAMESPACE
}  // namespace kvreplay
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvreplay {

HWY_EXPORT(kernels);

const TileKernels& tile_kernels() {
  choose_simd_level();
  return HWY_DYNAMIC_DISPATCH(kernels)();
}

}  // namespace kvreplay
#endif
