#include "cpu/elementary_kernels.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numbers>

#include "cpu/simd_level.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/elementary_kernels.cpp"
#include <hwy/foreach_target.h>
// Highway's order: its own headers come after foreach_target.h, in every pass over this file.
#include <hwy/highway.h>
// After highway.h.
#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace kvreplay {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::ScalableTag<double>;

/// x = change(x), a vector at a time; `filler` stands for what is missing from the last one.
template <class Change>
void change_all(double* x, std::ptrdiff_t n, double filler, const Change& change) {
  const Tag tag;
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(tag));
  std::ptrdiff_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(change(hn::LoadU(tag, x + i)), tag, x + i);
  if (i == n) return;
  HWY_ALIGN double rest[hn::MaxLanes(tag)];
  std::fill_n(rest, lanes, filler);
  std::copy_n(x + i, n - i, rest);
  hn::Store(change(hn::Load(tag, rest)), tag, rest);
  std::copy_n(rest, n - i, x + i);
}

double largest(const double* x, std::ptrdiff_t n, double least) {
  const Tag tag;
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(tag));
  auto a = hn::Set(tag, least), b = a;  // each waits for the one before
  std::ptrdiff_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    a = hn::Max(a, hn::LoadU(tag, x + i));
    b = hn::Max(b, hn::LoadU(tag, x + i + lanes));
  }
  HWY_ALIGN double of_lanes[hn::MaxLanes(tag)];
  hn::Store(hn::Max(a, b), tag, of_lanes);
  // Not by MaxOfLanes(): on some levels the largest of infinite negative numbers is a finite one.
  double most = *std::max_element(of_lanes, of_lanes + lanes);
  for (; i < n; ++i) most = std::max(most, x[i]);
  return most;
}

double exponentials(double* x, std::ptrdiff_t n, double most) {
  const Tag tag;
  auto sum = hn::Zero(tag);
  change_all(x, n, -std::numeric_limits<double>::infinity(), [&](auto logits) {
    const auto weights = hn::Exp(tag, hn::Sub(logits, hn::Set(tag, most)));
    sum = hn::Add(sum, weights);
    return weights;
  });
  return hn::GetLane(hn::SumOfLanes(tag, sum));
}

using Words = hn::RebindToUnsigned<Tag>;

/// mix() of random.h.
hn::Vec<Words> mixed(hn::Vec<Words> z) {
  const Words tag;
  z = hn::Add(z, hn::Set(tag, 0x9E3779B97F4A7C15u));
  z = hn::Mul(hn::Xor(z, hn::ShiftRight<30>(z)), hn::Set(tag, 0xBF58476D1CE4E5B9u));
  z = hn::Mul(hn::Xor(z, hn::ShiftRight<27>(z)), hn::Set(tag, 0x94D049BB133111EBu));
  return hn::Xor(z, hn::ShiftRight<31>(z));
}

// Numbers that are drawn at a time: whole vectors of every level.
constexpr std::ptrdiff_t noise_at_once = 256;

/// 2^64 u with u = uniform(chained(chain, x[i])) of random.h where that is below 1/2, else 2^64 (u - 1): exact numbers,
/// of which float32 keeps 24 digits.
void draw_centred(std::uint64_t chain, const std::int32_t* x, float* centred) {
  const Tag doubles;
  const hn::RebindToSigned<Tag> longs;
  const Words words;
  const hn::Rebind<std::int32_t, Tag> numbers;
  const hn::Rebind<float, Tag> floats;
  for (std::ptrdiff_t i = 0; i < noise_at_once; i += static_cast<std::ptrdiff_t>(hn::Lanes(doubles))) {
    const auto wide = hn::BitCast(words, hn::PromoteTo(longs, hn::LoadU(numbers, x + i)));
    const auto hash = mixed(hn::Xor(hn::Set(words, chain), wide));
    // The last 11 bits do not count; half of the place before them is added.
    const auto bits = hn::OrAnd(hn::Set(words, 0x400u), hash, hn::Set(words, ~std::uint64_t{0x7FF}));
    hn::Store(hn::DemoteTo(floats, hn::ConvertTo(doubles, hn::BitCast(longs, bits))), floats, centred + i);
  }
}

using FloatTag = hn::ScalableTag<float>;
using Floats = hn::Vec<FloatTag>;

/// A positive number 2^e (1 + f), f in [-1/2, 0).
struct Parts {
  Floats exponent;  // 2^23 e, as the bits of the number have it
  Floats f;
};

Parts parts_of(Floats x) {
  const FloatTag floats;
  const hn::RebindToSigned<FloatTag> integers;
  const auto bits = hn::BitCast(integers, x);
  const auto mantissa = hn::OrAnd(hn::Set(integers, 0x3F000000), bits, hn::Set(integers, 0x007FFFFF));
  return {hn::ConvertTo(floats, hn::Sub(bits, mantissa)),
          hn::Sub(hn::BitCast(floats, mantissa), hn::Set(floats, 1.0F))};
}

/// 2^23 (constant + slope x)
Floats scaled_line(Floats x, float constant, float slope) {
  const FloatTag floats;
  return hn::MulAdd(hn::Set(floats, 0x1p23F * slope), x, hn::Set(floats, 0x1p23F * constant));
}

/// 2^23 log2(2^e (1 + f)) = 2^23 (e + f p(f)) with p of degree 8, minimax with relative error 2.3e-8. Its terms are
/// added in pairs, so that few wait for others.
Floats scaled_log2(const Parts& x) {
  const FloatTag floats;
  const Floats f2 = hn::Mul(x.f, x.f), f4 = hn::Mul(f2, f2);
  const Floats p01 = scaled_line(x.f, 1.44269507F, -0.721337209F), p23 = scaled_line(x.f, 0.481428216F, -0.350293756F);
  const Floats p45 = scaled_line(x.f, 0.388968485F, 0.293642758F), p67 = scaled_line(x.f, 1.8144301F, 2.44653551F);
  const Floats p678 = hn::MulAdd(hn::Set(floats, 0x1p23F * 2.07907763F), f2, p67);
  const Floats p = hn::MulAdd(hn::MulAdd(p678, f2, p45), f4, hn::MulAdd(p23, f2, p01));
  return hn::MulAdd(p, x.f, x.exponent);
}

void perturb(std::uint64_t chain, const std::int32_t* x, float inverse_tau, float* logits) {
  const FloatTag floats;
  HWY_ALIGN float draws[noise_at_once];
  draw_centred(chain, x, draws);
  for (std::ptrdiff_t i = 0; i < noise_at_once; i += static_cast<std::ptrdiff_t>(hn::Lanes(floats))) {
    const auto centred = hn::Mul(hn::Load(floats, draws + i), hn::Set(floats, 0x1p-64F));
    // From 1/2 on u = 1 + f with the f that was drawn: near 1 rounding u would lose much of ln u.
    const auto above = hn::Lt(centred, hn::Zero(floats));
    Parts u = parts_of(centred);
    u.exponent = hn::IfThenZeroElse(above, u.exponent);
    u.f = hn::IfThenElse(above, centred, u.f);
    const auto exponential = hn::Mul(scaled_log2(u), hn::Set(floats, -0x1p-23F * std::numbers::ln2_v<float>));  // -ln u
    const auto sum =
        hn::NegMulAdd(scaled_log2(parts_of(exponential)), hn::Set(floats, 0x1p-23F), hn::LoadU(floats, logits + i));
    hn::StoreU(hn::Mul(sum, hn::Set(floats, inverse_tau)), floats, logits + i);
  }
}

void add_gumbel_noise(std::uint64_t chain, const std::int32_t* x, std::ptrdiff_t n, float tau, float* logits) {
  std::ptrdiff_t i = 0;
  for (; i + noise_at_once <= n; i += noise_at_once) perturb(chain, x + i, 1.0F / tau, logits + i);
  if (i == n) return;
  std::int32_t last[noise_at_once] = {};
  float rest[noise_at_once] = {};
  std::copy_n(x + i, n - i, last);
  std::copy_n(logits + i, n - i, rest);
  perturb(chain, last, 1.0F / tau, rest);
  std::copy_n(rest, n - i, logits + i);
}

void count_above(const double* x, std::ptrdiff_t n, double least, double number, double* counts, double* last) {
  const Tag tag;
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(tag));
  std::ptrdiff_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto above = hn::Gt(hn::LoadU(tag, x + i), hn::Set(tag, least));
    const auto count = hn::LoadU(tag, counts + i);
    hn::StoreU(hn::IfThenElse(above, hn::Add(count, hn::Set(tag, 1.0)), count), tag, counts + i);
    hn::StoreU(hn::IfThenElse(above, hn::Set(tag, number), hn::LoadU(tag, last + i)), tag, last + i);
  }
  for (; i < n; ++i) {
    if (!(x[i] > least)) continue;
    counts[i] += 1;
    last[i] = number;
  }
}

double count_equal(const double* a, const double* b, std::ptrdiff_t n) {
  const Tag tag;
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(tag));
  double count = 0;
  std::ptrdiff_t i = 0;
  for (; i + lanes <= n; i += lanes)
    count += static_cast<double>(hn::CountTrue(tag, hn::Eq(hn::LoadU(tag, a + i), hn::LoadU(tag, b + i))));
  for (; i < n; ++i) count += a[i] == b[i] ? 1 : 0;
  return count;
}

}  // namespace

const ElementaryKernels& elementary_table() {
  static const ElementaryKernels table{.largest = largest,
                                       .exponentials = exponentials,
                                       .add_gumbel_noise = add_gumbel_noise,
                                       .count_above = count_above,
                                       .count_equal = count_equal};
  return table;
}

}  // namespace HWY_NAMESPACE
}  // namespace kvreplay
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvreplay {

HWY_EXPORT(elementary_table);

const ElementaryKernels& elementary_kernels() {
  simd_level();
  return HWY_DYNAMIC_DISPATCH(elementary_table)();
}

}  // namespace kvreplay
#endif
