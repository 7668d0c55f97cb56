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

/// u = uniform(chained(chain, x[i])) of random.h where it is below 1/2, else u - 1: exact numbers, of which float32
/// keeps 24 digits.
void draw_centred(std::uint64_t chain, const std::int32_t* x, float* centred) {
  const Tag doubles;
  const hn::RebindToSigned<Tag> longs;
  const Words words;
  const hn::Rebind<std::int32_t, Tag> numbers;
  const hn::Rebind<float, Tag> floats;
  for (std::ptrdiff_t i = 0; i < noise_at_once; i += static_cast<std::ptrdiff_t>(hn::Lanes(doubles))) {
    const auto wide = hn::BitCast(words, hn::PromoteTo(longs, hn::LoadU(numbers, x + i)));
    const auto bits = hn::ShiftRight<11>(hn::BitCast(longs, mixed(hn::Xor(hn::Set(words, chain), wide))));
    const auto whole = hn::Add(hn::ConvertTo(doubles, bits), hn::Set(doubles, 0.5));
    hn::Store(hn::DemoteTo(floats, hn::Mul(whole, hn::Set(doubles, 0x1p-53))), floats, centred + i);
  }
}

void perturb(std::uint64_t chain, const std::int32_t* x, float tau, float* logits) {
  const hn::ScalableTag<float> floats;
  const auto one = hn::Set(floats, 1.0F);
  HWY_ALIGN float draws[noise_at_once];
  draw_centred(chain, x, draws);
  for (std::ptrdiff_t i = 0; i < noise_at_once; i += static_cast<std::ptrdiff_t>(hn::Lanes(floats))) {
    const auto centred = hn::Load(floats, draws + i);
    const auto above = hn::Lt(centred, hn::Zero(floats));
    const auto u = hn::IfThenElse(above, hn::Add(one, centred), centred);
    // Near 1 what u lost by rounding is much of -ln u.
    const auto lost = hn::IfThenElseZero(above, hn::Sub(hn::Sub(u, one), centred));
    const auto noise = hn::Log(floats, hn::Sub(lost, hn::Log(floats, u)));  // -G
    const auto sum =
        hn::Sub(hn::LoadU(floats, logits + i), hn::Mul(noise, hn::Set(floats, std::numbers::log2e_v<float>)));
    hn::StoreU(hn::Div(sum, hn::Set(floats, tau)), floats, logits + i);
  }
}

void add_gumbel_noise(std::uint64_t chain, const std::int32_t* x, std::ptrdiff_t n, float tau, float* logits) {
  std::ptrdiff_t i = 0;
  for (; i + noise_at_once <= n; i += noise_at_once) perturb(chain, x + i, tau, logits + i);
  if (i == n) return;
  std::int32_t last[noise_at_once] = {};
  float rest[noise_at_once] = {};
  std::copy_n(x + i, n - i, last);
  std::copy_n(logits + i, n - i, rest);
  perturb(chain, last, tau, rest);
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
