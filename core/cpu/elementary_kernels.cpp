#include "cpu/elementary_kernels.h"

#include <algorithm>
#include <limits>

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

void gumbel_variates(double* x, std::ptrdiff_t n) {
  const Tag tag;
  change_all(x, n, 0.5, [&](auto uniform) { return hn::Neg(hn::Log(tag, hn::Neg(hn::Log(tag, uniform)))); });
}

}  // namespace

const ElementaryKernels& elementary_table() {
  static const ElementaryKernels table{.exponentials = exponentials, .gumbel_variates = gumbel_variates};
  return table;
}

}  // namespace HWY_NAMESPACE
}  // namespace kvreplay
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvreplay {

HWY_EXPORT(elementary_table);

const ElementaryKernels& elementary_kernels() {
  choose_simd_level();
  return HWY_DYNAMIC_DISPATCH(elementary_table)();
}

}  // namespace kvreplay
#endif
