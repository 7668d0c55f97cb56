#include "cpu/tile.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>

#include "cpu/simd_level.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tile.cpp"
#include <hwy/foreach_target.h>
// Highway's order: its own headers come after foreach_target.h, in every pass over this file.
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include "cpu/register_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvreplay {
namespace HWY_NAMESPACE {
namespace {

constexpr int tile_size = tile_rows * tile_columns;
// A panel that is not full is computed in steps of so many rows.
constexpr int height_step = tile_rows / 3;
constexpr int cache_line = 64 / sizeof(float);

constexpr float headroom = 60.0F;           // p up to 2^60: row sums of 2^60 keys' worth still fit into float32
constexpr float lowest_exponent = -110.0F;  // from here on p counts as 0, and never becomes denormal

HWY_INLINE Vector splat(float x) { return hn::Set(Floats(), x); }
HWY_INLINE hn::Vec<Integers> splat(std::int32_t x) { return hn::Set(Integers(), x); }

/// 2^f for |f| <= 1/2, relative error 1e-7 (minimax of degree 5).
HWY_INLINE Vector power_of_two(Vector f) {
  Vector p = hn::MulAdd(splat(0.00132764725F), f, splat(0.00967554189F));
  p = hn::MulAdd(p, f, splat(0.0555071309F));
  p = hn::MulAdd(p, f, splat(0.240221202F));
  p = hn::MulAdd(p, f, splat(0.693146944F));
  return hn::MulAdd(p, f, splat(1.0F));
}

/// 2^(x - R) for an integer R, and its exponent, round(x) - R. NaN stays NaN.
HWY_INLINE Vector exponential(Vector x, Vector reference, Vector& exponent) {
  const Vector whole = hn::Round(x);
  exponent = hn::Sub(whole, reference);
  const Vector p = power_of_two(hn::Sub(x, whole));
#if KVREPLAY_AVX512
  const __mmask16 counts = _mm512_cmp_ps_mask(exponent.raw, splat(lowest_exponent).raw, _CMP_NLE_UQ);
  return Vector{_mm512_maskz_scalef_ps(counts, p.raw, exponent.raw)};
#else
  // The sum with 1.5 * 2^23 + 127 holds exponent + 127 in its last bits; these move to where 2^exponent has them.
  const auto bits = hn::BitCast(Integers(), hn::Add(exponent, splat(12583039.0F)));
  const Vector scaled = hn::Mul(p, hn::BitCast(Floats(), hn::ShiftLeft<23>(bits)));
  return hn::IfThenZeroElse(hn::Le(exponent, splat(lowest_exponent)), scaled);
#endif
}

struct Float32 {
  static constexpr int numbers_a_cell = 1;
  using Product = FusedProduct;
  static HWY_INLINE Vector scaled(Vector product, const TileBlock&) { return product; }
};

#if KVREPLAY_AVX512
struct Bfloat16 {
  static constexpr int numbers_a_cell = 2;
  using Product = PairProduct;
  static HWY_INLINE Vector scaled(Vector product, const TileBlock& block) {
    return hn::Mul(product, splat(block.scale));
  }
};
#endif

/// sums = products of a panel of the block and a tile of keys.
template <class Form, int height>
HWY_INLINE void multiply_panel(const TileBlock& block, const float* keys, int panel, Vector (&sums)[height][vectors]) {
  clear(Floats(), sums);
  const float* queries = block.queries + static_cast<std::ptrdiff_t>(panel) * block.cells * tile_rows;
  multiply<typename Form::Product>(Floats(), queries, keys, block.cells, sums);
}

std::ptrdiff_t piece_offset(const TileBlock& block, int tile, int panel) {
  return (static_cast<std::ptrdiff_t>(tile - block.first_tile) * block.panels + panel) * tile_size;
}

HWY_INLINE bool above_headroom(Vector exponents) { return !hn::AllFalse(Floats(), hn::Gt(exponents, splat(headroom))); }

HWY_INLINE void add_to_lanes(Vector sum, float* lane_sums) {
  hn::Store(hn::Add(hn::Load(Floats(), lane_sums), sum), Floats(), lane_sums);
}

/// p of one row of a tile that it sees whole. Returns their sum in each lane.
HWY_INLINE Vector whole_row(Vector x0, Vector x1, float reference, float* p, Vector& highest) {
  Vector exponent0, exponent1;
  const Vector p0 = exponential(x0, splat(reference), exponent0);
  const Vector p1 = exponential(x1, splat(reference), exponent1);
  highest = hn::Max(hn::Max(highest, exponent0), exponent1);
  hn::Store(p0, Floats(), p);
  hn::Store(p1, Floats(), p + lanes);
  return hn::Add(p0, p1);
}

/// A tile that all rows of the panel see whole, with settled references: everything stays in registers.
template <class Form, int height, bool with_logits>
HWY_NOINLINE bool whole_exponentials(const TileBlock& block, const float* keys, int tile, int panel) {
  const Floats floats;
  const std::ptrdiff_t piece = piece_offset(block, tile, panel);
  float* p = block.exponentials + piece;
  // Fetched while the product is computed, or the stores would wait for one line after the other.
#pragma GCC unroll 32
  for (int i = 0; i < height * tile_columns; i += cache_line) __builtin_prefetch(p + i, 1);
  Vector sums[height][vectors];
  multiply_panel<Form>(block, keys, panel, sums);

  const float* references = block.reference + panel * tile_rows;
  float* lane_sums = block.lane_sums + static_cast<std::ptrdiff_t>(panel) * tile_size;
  Vector highest = splat(0.0F);
#pragma GCC unroll 16
  for (int r = 0; r < height; ++r) {
    const Vector x0 = Form::scaled(sums[r][0], block);
    const Vector x1 = Form::scaled(sums[r][1], block);
    if (with_logits) {
      hn::Store(x0, floats, block.logits + piece + r * tile_columns);
      hn::Store(x1, floats, block.logits + piece + r * tile_columns + lanes);
    }
    const Vector sum = whole_row(x0, x1, references[r], p + r * tile_columns, highest);
    add_to_lanes(sum, lane_sums + r * tile_columns);
  }
  return !above_headroom(highest);
}

template <class Form, int height>
HWY_INLINE void tile_logits(const TileBlock& block, const float* keys, int panel, float* x) {
  const Floats floats;
  Vector sums[height][vectors];
  multiply_panel<Form>(block, keys, panel, sums);
  store(floats, sums, x);
  if (Form::numbers_a_cell == 1 && block.cap == 0.0F) return;
  for (int i = 0; i < height * tile_columns; i += lanes) {
    const Vector scaled = Form::scaled(hn::Load(floats, x + i), block);
    hn::Store(block.cap == 0.0F ? scaled : hn::Mul(splat(block.cap), hn::Tanh(floats, scaled)), floats, x + i);
  }
}

HWY_INLINE hn::Mask<Floats> visible(int first, int end, int key) {
  // Iota of a number that is not constant is stored lane by lane, and a vector loaded from there would wait for it.
  const auto number = hn::Add(hn::Iota(Integers(), 0), splat(key));
  const auto begun = hn::Gt(number, splat(first - 1));
  return hn::RebindMask(Floats(), hn::And(begun, hn::Lt(number, splat(end))));
}

/// ceil of the largest x of the keys [first, end) in a tile; -infinity where there is none.
HWY_INLINE float row_reference(int first, int end, int first_key, const float* x) {
  const Floats floats;
  Vector highest = splat(-HUGE_VALF);
  for (int v = 0; v < tile_columns; v += lanes) {
    const Vector seen = hn::IfThenElse(visible(first, end, first_key + v), hn::Load(floats, x + v), highest);
    highest = hn::Max(highest, seen);
  }
  return std::ceil(hn::GetLane(hn::MaxOfLanes(floats, highest)));
}

/// p of one row of a tile, 0 beyond the keys [first, end). Returns their sum in each lane.
HWY_INLINE Vector masked_row(int first, int end, int first_key, float reference, const float* x, float* p,
                             Vector& highest) {
  const Floats floats;
  Vector sum = hn::Zero(floats);
  for (int v = 0; v < tile_columns; v += lanes) {
    const auto seen = visible(first, end, first_key + v);
    Vector exponent;
    const Vector powers = hn::IfThenElseZero(seen, exponential(hn::Load(floats, x + v), splat(reference), exponent));
    highest = hn::Max(highest, hn::IfThenElse(seen, exponent, highest));
    hn::Store(powers, floats, p + v);
    sum = hn::Add(sum, powers);
  }
  return sum;
}

void settle(const TileBlock& block, int panel) {
  bool settled = true;
  for (int row = panel * tile_rows; row < std::min((panel + 1) * tile_rows, block.rows); ++row)
    settled = settled && block.reference[row] != -HUGE_VALF;
  block.settled[panel] = settled;
}

/// Any tile: masks, softcap, references set where a row sees its first key, logits kept if wanted.
template <class Form, int height>
HWY_NOINLINE bool masked_exponentials(const TileBlock& block, const float* keys, int tile, int panel) {
  const Floats floats;
  HWY_ALIGN float x[tile_size];
  tile_logits<Form, height>(block, keys, panel, x);
  const std::ptrdiff_t piece = piece_offset(block, tile, panel);
  float* lane_sums = block.lane_sums + static_cast<std::ptrdiff_t>(panel) * tile_size;
  const int first_key = tile * tile_columns;
  Vector highest = splat(0.0F);
  for (int r = 0; r < height; ++r) {
    const int row = panel * tile_rows + r;
    const int first = block.first[row], end = block.end[row];
    const int begin = r * tile_columns;
    if (block.reference[row] == -HUGE_VALF) block.reference[row] = row_reference(first, end, first_key, x + begin);
    const Vector sum =
        masked_row(first, end, first_key, block.reference[row], x + begin, block.exponentials + piece + begin, highest);
    add_to_lanes(sum, lane_sums + begin);
    if (block.logits == nullptr) continue;
    for (int v = 0; v < tile_columns; v += lanes)
      hn::Store(hn::IfThenElseZero(visible(first, end, first_key + v), hn::Load(floats, x + begin + v)), floats,
                block.logits + piece + begin + v);
  }
  if (!block.settled[panel]) settle(block, panel);
  return !above_headroom(highest);
}

template <class Form, int height>
HWY_INLINE bool panel_exponentials(const TileBlock& block, const float* keys, int tile, int panel) {
  const bool whole = block.cap == 0.0F && block.settled[panel] &&
                     block.ranges[panel].sees_all(tile * tile_columns, (tile + 1) * tile_columns);
  if (!whole) return masked_exponentials<Form, height>(block, keys, tile, panel);
  return (block.logits == nullptr ? whole_exponentials<Form, height, false>
                                  : whole_exponentials<Form, height, true>)(block, keys, tile, panel);
}

template <class Form>
bool exponentials(const TileBlock& block, const float* keys, int tile) {
  for (int panel = 0; panel < block.panels; ++panel) {
    if (!block.ranges[panel].sees_some(tile * tile_columns, (tile + 1) * tile_columns)) continue;
    const int used = block.rows - panel * tile_rows;
    const auto compute = used > 2 * height_step ? panel_exponentials<Form, tile_rows>
                         : used > height_step   ? panel_exponentials<Form, 2 * height_step>
                                                : panel_exponentials<Form, height_step>;
    if (!compute(block, keys, tile, panel)) return false;
  }
  return true;
}

template <class Form>
void raise_references(const TileBlock& block, const float* keys, int tile) {
  HWY_ALIGN float x[tile_size];
  for (int panel = 0; panel < block.panels; ++panel) {
    if (!block.ranges[panel].sees_some(tile * tile_columns, (tile + 1) * tile_columns)) continue;
    tile_logits<Form, tile_rows>(block, keys, panel, x);
    for (int r = 0; r < tile_rows; ++r) {
      const int row = panel * tile_rows + r;
      const float highest = row_reference(block.first[row], block.end[row], tile * tile_columns, x + r * tile_columns);
      if (!(highest <= block.reference[row])) block.reference[row] = highest;
    }
    settle(block, panel);
  }
}

template <class Form>
void logits(const TileBlock& block, const float* keys, std::ptrdiff_t stride, float* out) {
  HWY_ALIGN float x[tile_size];
  for (int panel = 0; panel < block.panels; ++panel) {
    tile_logits<Form, tile_rows>(block, keys, panel, x);
    const int rows = std::min(tile_rows, block.rows - panel * tile_rows);
    for (int r = 0; r < rows; ++r) {
      float* row = out + (panel * tile_rows + r) * stride;
      for (int v = 0; v < tile_columns; v += lanes)
        hn::Store(hn::Load(Floats(), x + r * tile_columns + v), Floats(), row + v);
    }
  }
}

/// Σ over the lanes, which begin again.
HWY_INLINE double folded(float* lane_sums) {
  double sum = 0.0;
  for (int lane = 0; lane < lanes; ++lane) {
    sum += static_cast<double>(lane_sums[lane]);
    lane_sums[lane] = 0.0F;
  }
  return sum;
}

void fold_row_sums(const TileBlock& block) {
  for (int row = 0; row < block.panels * tile_rows; ++row)
    block.row_sums[row] += folded(block.lane_sums + static_cast<std::ptrdiff_t>(row) * tile_columns);
}

bool row_exponentials(LogitRow& row) {
  const Floats floats;
  Vector lane_sums = splat(0.0F);
  HWY_ALIGN float stored_sums[lanes];
  const auto fold = [&]() HWY_ATTR {
    hn::Store(lane_sums, floats, stored_sums);
    row.sum += folded(stored_sums);
    lane_sums = splat(0.0F);
  };
  row.sum = 0.0;
  for (int tile = row.first / tile_columns; tile * tile_columns < row.end; ++tile) {
    const int begin = tile * tile_columns;
    const float* x = row.logits + begin;
    float* p = row.exponentials + begin;
    if (row.reference == -HUGE_VALF) row.reference = row_reference(row.first, row.end, begin, x);
    const bool whole = row.first <= begin && begin + tile_columns <= row.end;
    Vector highest = splat(0.0F);
    const Vector sum = whole ? whole_row(hn::Load(floats, x), hn::Load(floats, x + lanes), row.reference, p, highest)
                             : masked_row(row.first, row.end, begin, row.reference, x, p, highest);
    if (above_headroom(highest)) return false;
    lane_sums = hn::Add(lane_sums, sum);
    if (tile % tiles_between_folds == tiles_between_folds - 1) fold();
  }
  fold();
  return true;
}

void raise_row_reference(LogitRow& row) {
  for (int tile = row.first / tile_columns; tile * tile_columns < row.end; ++tile) {
    const float highest = row_reference(row.first, row.end, tile * tile_columns, row.logits + tile * tile_columns);
    if (!(highest <= row.reference)) row.reference = highest;
  }
}

struct Sum {
  static auto of(auto a, auto b) { return hn::Add(a, b); }
  static double of_numbers(double a, double b) { return a + b; }
};
struct Largest {
  static auto of(auto a, auto b) { return hn::Max(a, b); }
  static double of_numbers(double a, double b) { return std::max(a, b); }
};

template <class With>
void join_row_shares(const LogitRow& row, float factor, double* joined) {
  const Doubles doubles;
  const HalfFloats floats;
  const float* p = row.exponentials + row.first;
  const int count = row.end - row.first;
  int key = 0;
  for (; key + wide_lanes <= count; key += wide_lanes) {
    const auto share = hn::Mul(hn::Set(floats, factor), hn::LoadU(floats, p + key));
    hn::StoreU(With::of(hn::LoadU(doubles, joined + key), hn::PromoteTo(doubles, share)), doubles, joined + key);
  }
  for (; key < count; ++key) joined[key] = With::of_numbers(joined[key], static_cast<double>(factor * p[key]));
}

void add_columns(const TileBlock& block, int tile, int begin, int end, const float* factors, double* columns) {
  const Floats floats;
  const int first_key = tile * tile_columns;
  Vector sums[2][vectors] = {{hn::Zero(floats), hn::Zero(floats)}, {hn::Zero(floats), hn::Zero(floats)}};
  for (int panel = begin / tile_rows; panel * tile_rows < end; ++panel) {
    if (!block.ranges[panel].sees_some(first_key, first_key + tile_columns)) continue;
    const float* p = block.exponentials + piece_offset(block, tile, panel);
    const int from = begin > panel * tile_rows ? begin - panel * tile_rows : 0;
    const int to = end < (panel + 1) * tile_rows ? end - panel * tile_rows : tile_rows;
    const float* panel_factors = factors + panel * tile_rows;
    const auto add_row = [&](int r, Vector(&into)[vectors]) HWY_ATTR {
      const Vector factor = splat(panel_factors[r]);
      into[0] = hn::MulAdd(factor, hn::Load(floats, p + r * tile_columns), into[0]);
      into[1] = hn::MulAdd(factor, hn::Load(floats, p + r * tile_columns + lanes), into[1]);
    };
    int r = from;
    for (; r + 1 < to; r += 2) {
      add_row(r, sums[0]);
      add_row(r + 1, sums[1]);
    }
    if (r < to) add_row(r, sums[0]);
  }
  HWY_ALIGN float total[tile_columns];
  hn::Store(hn::Add(sums[0][0], sums[1][0]), floats, total);
  hn::Store(hn::Add(sums[0][1], sums[1][1]), floats, total + lanes);
  for (int key = 0; key < tile_columns; ++key) columns[key] += static_cast<double>(total[key]);
}

template <int height>
HWY_INLINE void wide_products_of(const WidePanel& panel, const double* tile, int dim, double* out) {
  WideVector sums[height][vectors];
  clear(Doubles(), sums);
  const double* row = panel.rows;
  for (int k = 0; k < dim; ++k, row += panel.step, tile += wide_tile_columns)
    add_row_products<SeparateProduct>(Doubles(), row, panel.row_step, tile, sums);
  store(Doubles(), sums, out);
}

void wide_products(const WidePanel& panel, const double* tile, int dim, int count, double* out) {
  if (count == 1)
    wide_products_of<1>(panel, tile, dim, out);
  else if (count <= tile_rows / 3)
    wide_products_of<tile_rows / 3>(panel, tile, dim, out);
  else
    wide_products_of<tile_rows>(panel, tile, dim, out);
}

/// float16 -> float32. Where Highway converts without an instruction, it takes infinities and NaN for numbers from 2^16
/// on: these get the exponent that they should have.
template <class D>
HWY_INLINE hn::Vec<D> promoted(D floats, hn::Vec<hn::Rebind<hwy::float16_t, D>> halves) {
  const auto x = hn::PromoteTo(floats, halves);
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
  return x;
#else
  const hn::RebindToSigned<D> integers;
  const auto none = hn::BitCast(floats, hn::Or(hn::BitCast(integers, x), hn::Set(integers, 0x7F800000)));
  return hn::IfThenElse(hn::Ge(hn::Abs(x), hn::Set(floats, 65536.0F)), none, x);
#endif
}

/// Numbers of `type` as they are stored -> float32.
template <DType type, class D>
HWY_INLINE hn::Vec<D> widened(D floats, hn::Vec<hn::Rebind<std::uint16_t, D>> bits) {
  if constexpr (type == DType::bfloat16) {
    return hn::BitCast(floats, hn::ShiftLeft<16>(hn::PromoteTo(hn::RebindToUnsigned<D>(), bits)));
  } else {
    return promoted(floats, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), bits));
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
    return type == DType::bfloat16 ? widened<DType::bfloat16>(floats, bits) : widened<DType::float16>(floats, bits);
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

void widen_to_double(const std::byte* source, DType type, int count, double* out) {
  constexpr int at_once = 4 * lanes;
  HWY_ALIGN float narrow[at_once];
  const auto element = static_cast<std::ptrdiff_t>(size_of(type));
  for (int i = 0; i < count; i += at_once) {
    const int some = std::min(at_once, count - i);
    widen(source + i * element, type, some, narrow);
    int k = 0;
    for (; k + wide_lanes <= some; k += wide_lanes)
      hn::StoreU(hn::PromoteTo(Doubles(), hn::Load(HalfFloats(), narrow + k)), Doubles(), out + i + k);
    for (; k < some; ++k) out[i + k] = static_cast<double>(narrow[k]);
  }
}

#if HWY_TARGET != HWY_SCALAR
using Four = hn::FixedTag<float, 4>;

/// Four numbers of a vector, then of every fourth one after it, side by side.
template <class D>
HWY_INLINE hn::Vec<D> load_fours(D tag, const std::byte* const* row, std::ptrdiff_t offset) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(*row + offset);
    return hn::BitCast(tag, hn::LoadU(hn::Repartition<std::uint8_t, D>(), bytes));
  } else {
    const hn::Half<D> half;
    return hn::Combine(tag, load_fours(half, row + hn::MaxLanes(half), offset), load_fours(half, row, offset));
  }
}

template <DType type, class Tag>
HWY_INLINE hn::Vec<Tag> load_cells(Tag tag, const std::byte* const* row, std::ptrdiff_t offset) {
  if constexpr (type == DType::float32) {
    return load_fours(tag, row, offset);
  } else {
    return widened<type>(tag, load_fours(hn::Rebind<std::uint16_t, Tag>(), row, offset));
  }
}

/// Four cells of as many vectors as there are lanes, transposed.
template <DType type, class Tag>
HWY_INLINE void pack_four_cells(Tag tag, const std::byte* const* rows, std::ptrdiff_t offset,
                                hn::Vec<Tag> (&cells)[4]) {
  const hn::Repartition<double, Tag> pairs;
  const auto row0 = load_cells<type>(tag, rows, offset);
  const auto row1 = load_cells<type>(tag, rows + 1, offset);
  const auto row2 = load_cells<type>(tag, rows + 2, offset);
  const auto row3 = load_cells<type>(tag, rows + 3, offset);
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(tag, row0, row1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(tag, row2, row3));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(tag, row0, row1));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(tag, row2, row3));
  cells[0] = hn::BitCast(tag, hn::InterleaveLower(pairs, low01, low23));
  cells[1] = hn::BitCast(tag, hn::InterleaveUpper(pairs, low01, low23));
  cells[2] = hn::BitCast(tag, hn::InterleaveLower(pairs, high01, high23));
  cells[3] = hn::BitCast(tag, hn::InterleaveUpper(pairs, high01, high23));
}

/// A width that is not one of whole vectors ends with a vector that overlaps the one before.
template <DType type, class Tag>
void pack_cells(Tag tag, const std::byte* const* rows, int row_bytes, int width, float* out) {
  constexpr int step = static_cast<int>(hn::MaxLanes(Tag()));
  constexpr int four_bytes = 4 * static_cast<int>(size_of(type));
  const int cells = (4 * row_bytes + four_bytes - 1) / four_bytes;
  for (int c = 0; c < cells; c += 4) {
    float* columns = out + static_cast<std::ptrdiff_t>(c) * width;
    const int offset = c / 4 * four_bytes;
    const bool whole = offset + four_bytes <= row_bytes;
    for (int begin = 0; begin < width; begin += step) {
      const int r = std::min(begin, width - step);
      hn::Vec<Tag> packed[4];
      if (whole) {
        pack_four_cells<type>(tag, rows + r, offset, packed);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) hn::StoreU(packed[i], tag, columns + i * width + r);
        continue;
      }
      std::byte rest[step][four_bytes] = {};
      const std::byte* own[step];
      for (int i = 0; i < step; ++i)
        own[i] = static_cast<std::byte*>(
            std::memcpy(rest[i], rows[r + i] + offset, static_cast<std::size_t>(row_bytes - offset)));
      pack_four_cells<type>(tag, own, 0, packed);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        if (c + i < cells) hn::StoreU(packed[i], tag, columns + i * width + r);
    }
  }
}
#endif

/// Vectors of `row_bytes` bytes, numbers of `type`, each of which becomes a cell.
template <DType type>
void pack_cells(const std::byte* const* rows, int row_bytes, int width, float* out) {
#if HWY_TARGET == HWY_SCALAR
  constexpr int size = static_cast<int>(size_of(type));
  for (int r = 0; r < width; ++r) {
    for (int offset = 0; offset < row_bytes; offset += size) {
      std::byte cell[size] = {};
      std::memcpy(cell, rows[r] + offset, static_cast<std::size_t>(std::min(size, row_bytes - offset)));
      widen(cell, type, 1, out + static_cast<std::ptrdiff_t>(offset / size) * width + r);
    }
  }
#else
  if (width % lanes == 0) return pack_cells<type>(Floats(), rows, row_bytes, width, out);
  pack_cells<type>(Four(), rows, row_bytes, width, out);
#endif
}

void pack_float32(const std::byte* const* rows, DType type, int dim, int width, float* out) {
  const int row_bytes = dim * static_cast<int>(size_of(type));
  if (type == DType::float32) pack_cells<DType::float32>(rows, row_bytes, width, out);
  if (type == DType::float16) pack_cells<DType::float16>(rows, row_bytes, width, out);
  if (type == DType::bfloat16) pack_cells<DType::bfloat16>(rows, row_bytes, width, out);
}

#if KVREPLAY_AVX512
/// A pair of bfloat16 numbers is moved like a float32.
void pack_bfloat16(const std::byte* const* rows, DType type, int dim, int width, float* out) {
  assert(type == DType::bfloat16);
  pack_cells<DType::float32>(rows, dim * static_cast<int>(size_of(type)), width, out);
}
#endif

void wide_pack(const double* keys, int count, int dim, double* out) {
  for (int c = 0; c < dim; ++c) {
    double* row = out + static_cast<std::ptrdiff_t>(c) * wide_tile_columns;
    for (int r = 0; r < count; ++r) row[r] = keys[static_cast<std::ptrdiff_t>(r) * dim + c];
    for (int r = count; r < wide_tile_columns; ++r) row[r] = 0;
  }
}

}  // namespace

const TileKernels& kernels() {
#if KVREPLAY_AVX512
  static const TileForm bfloat16{.numbers_a_cell = Bfloat16::numbers_a_cell,
                                 .pack = pack_bfloat16,
                                 .exponentials = exponentials<Bfloat16>,
                                 .raise_references = raise_references<Bfloat16>,
                                 .logits = logits<Bfloat16>};
  constexpr const TileForm* bfloat16_form = &bfloat16;
#else
  constexpr const TileForm* bfloat16_form = nullptr;
#endif
  static const TileKernels table{
      .rows = tile_rows,
      .keys = tile_columns,
      .wide_keys = wide_tile_columns,
      .float32 = {.numbers_a_cell = Float32::numbers_a_cell,
                  .pack = pack_float32,
                  .exponentials = exponentials<Float32>,
                  .raise_references = raise_references<Float32>,
                  .logits = logits<Float32>},
      .bfloat16 = bfloat16_form,
      .widen = widen,
      .widen_to_double = widen_to_double,
      .wide_pack = wide_pack,
      .row_exponentials = row_exponentials,
      .raise_row_reference = raise_row_reference,
      .add_row_shares = join_row_shares<Sum>,
      .raise_to_row_shares = join_row_shares<Largest>,
      .fold_row_sums = fold_row_sums,
      .add_columns = add_columns,
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
  const SimdLevel& level = simd_level();
  const TileKernels& kernels = HWY_DYNAMIC_DISPATCH(kernels)();
  if (level.bfloat16 || kernels.bfloat16 == nullptr) return kernels;
  static const TileKernels without_bfloat16 = [&] {
    TileKernels copy = kernels;
    copy.bfloat16 = nullptr;
    return copy;
  }();
  return without_bfloat16;
}

}  // namespace kvreplay
#endif
