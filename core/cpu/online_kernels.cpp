#include "cpu/online_kernels.h"

#include <cmath>

#include "cpu/simd_level.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/online_kernels.cpp"
#include <hwy/foreach_target.h>
// Highway's order: its own headers come after foreach_target.h, in every pass over this file.
#include <hwy/highway.h>

#include "cpu/register_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvreplay {
namespace HWY_NAMESPACE {
namespace {

double sum(const SlotRow& row, int tiles, int keys) {
  const Doubles doubles;
  const HalfFloats halves;
  WideVector even = hn::Zero(doubles);
  WideVector odd = hn::Zero(doubles);
  for (int tile = 0; tile < tiles; ++tile) {
    const float* p = row.exponentials + tile * row.stride;
    for (int key = 0; key < keys; key += 2 * wide_lanes) {
      even = hn::Add(even, hn::PromoteTo(doubles, hn::Load(halves, p + key)));
      odd = hn::Add(odd, hn::PromoteTo(doubles, hn::Load(halves, p + key + wide_lanes)));
    }
  }
  return hn::GetLane(hn::SumOfLanes(doubles, hn::Add(even, odd)));
}

void add_shares(const SlotRow* rows, int count, int tiles, int keys, double* scores) {
  const Doubles doubles;
  const HalfFloats halves;
  const WideVector divisor = hn::Set(doubles, static_cast<double>(count));
  for (int tile = 0; tile < tiles; ++tile) {
    for (int key = 0; key < keys; key += wide_lanes) {
      WideVector shares = hn::Zero(doubles);
      for (int r = 0; r < count; ++r) {
        const auto p = hn::Load(halves, rows[r].exponentials + tile * rows[r].stride + key);
        shares = hn::Add(shares, hn::PromoteTo(doubles, hn::Div(p, hn::Set(halves, rows[r].sum))));
      }
      double* score = scores + static_cast<std::ptrdiff_t>(tile) * keys + key;
      hn::Store(hn::Add(hn::Load(doubles, score), hn::Div(shares, divisor)), doubles, score);
    }
  }
}

int lowest(const double* scores, const std::int64_t* positions, int count, std::int64_t begin, std::int64_t end) {
  const Doubles doubles;
  const Longs longs;
  using LongVector = hn::Vec<Longs>;
  WideVector least = hn::Set(doubles, HUGE_VAL);
  LongVector last = hn::Set(longs, -1);
  LongVector where = hn::Set(longs, -1);
  LongVector slot_number = hn::Iota(longs, 0);
  for (int slot = 0; slot < count; slot += wide_lanes) {
    const WideVector score = hn::Load(doubles, scores + slot);
    const LongVector position = hn::Load(longs, positions + slot);
    const auto lower = hn::Lt(score, least);
    const auto later = hn::And(hn::Eq(score, least), hn::RebindMask(doubles, hn::Gt(position, last)));
    const auto may_go = hn::RebindMask(
        doubles, hn::And(hn::Lt(position, hn::Set(longs, end)), hn::Gt(position, hn::Set(longs, begin - 1))));
    const auto better = hn::And(may_go, hn::Or(lower, later));
    least = hn::IfThenElse(better, score, least);
    last = hn::IfThenElse(hn::RebindMask(longs, better), position, last);
    where = hn::IfThenElse(hn::RebindMask(longs, better), slot_number, where);
    slot_number = hn::Add(slot_number, hn::Set(longs, wide_lanes));
  }
  HWY_ALIGN double scores_of[wide_lanes];
  HWY_ALIGN std::int64_t positions_of[wide_lanes];
  HWY_ALIGN std::int64_t slots[wide_lanes];
  hn::Store(least, doubles, scores_of);
  hn::Store(last, longs, positions_of);
  hn::Store(where, longs, slots);
  int best = 0;
  for (int lane = 1; lane < wide_lanes; ++lane) {
    if (scores_of[lane] < scores_of[best] ||
        (scores_of[lane] == scores_of[best] && positions_of[lane] > positions_of[best]))
      best = lane;
  }
  return static_cast<int>(slots[best]);
}

}  // namespace

const OnlineKernels& online_table() {
  static const OnlineKernels table{.sum = sum, .add_shares = add_shares, .lowest = lowest};
  return table;
}

}  // namespace HWY_NAMESPACE
}  // namespace kvreplay
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvreplay {

HWY_EXPORT(online_table);

const OnlineKernels& online_kernels() {
  choose_simd_level();
  return HWY_DYNAMIC_DISPATCH(online_table)();
}

}  // namespace kvreplay
#endif
