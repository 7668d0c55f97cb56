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

/// The lowest scores so far of some lanes, of equal ones those of the highest positions.
struct LowestOfLanes {
  using LongVector = hn::Vec<Longs>;

  LowestOfLanes() : least(hn::Set(Doubles(), HUGE_VAL)), last(hn::Set(Longs(), -1)), slots(hn::Set(Longs(), -1)) {}

  void see(WideVector scores, LongVector positions, LongVector slot_numbers, LongVector begin, LongVector end) {
    const Doubles doubles;
    const Longs longs;
    const auto lower = hn::Lt(scores, least);
    const auto later = hn::And(hn::Eq(scores, least), hn::RebindMask(doubles, hn::Gt(positions, last)));
    const auto may_go = hn::RebindMask(doubles, hn::AndNot(hn::Lt(positions, begin), hn::Lt(positions, end)));
    const auto better = hn::And(may_go, hn::Or(lower, later));
    least = hn::IfThenElse(better, scores, least);
    last = hn::IfThenElse(hn::RebindMask(longs, better), positions, last);
    slots = hn::IfThenElse(hn::RebindMask(longs, better), slot_numbers, slots);
  }

  WideVector least;
  LongVector last;
  LongVector slots;
};

int lowest(const double* scores, const std::int64_t* positions, int count, std::int64_t begin, std::int64_t end) {
  const Doubles doubles;
  const Longs longs;
  constexpr int chains = 2;  // each waits for its own last vector
  LowestOfLanes of[chains];
  auto numbers = hn::Iota(longs, 0);
  for (int slot = 0; slot < count; slot += chains * wide_lanes) {
    for (int chain = 0; chain < chains; ++chain) {
      const int first = slot + chain * wide_lanes;
      of[chain].see(hn::Load(doubles, scores + first), hn::Load(longs, positions + first), numbers,
                    hn::Set(longs, begin), hn::Set(longs, end));
      numbers = hn::Add(numbers, hn::Set(longs, wide_lanes));
    }
  }
  HWY_ALIGN double least[chains * wide_lanes];
  HWY_ALIGN std::int64_t last[chains * wide_lanes];
  HWY_ALIGN std::int64_t slots[chains * wide_lanes];
  for (int chain = 0; chain < chains; ++chain) {
    hn::Store(of[chain].least, doubles, least + chain * wide_lanes);
    hn::Store(of[chain].last, longs, last + chain * wide_lanes);
    hn::Store(of[chain].slots, longs, slots + chain * wide_lanes);
  }
  int best = 0;
  for (int lane = 1; lane < chains * wide_lanes; ++lane)
    if (least[lane] < least[best] || (least[lane] == least[best] && last[lane] > last[best])) best = lane;
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
  simd_level();
  return HWY_DYNAMIC_DISPATCH(online_table)();
}

}  // namespace kvreplay
#endif
