// Step by step, over what is held alone. Logits of many steps are products that do not depend on what goes meanwhile:
// they are made first, by the whole device. Then one block a row takes the steps.
#include <algorithm>

#include "attention/row_sums.h"
#include "cuda/attention_rows.h"
#include "cuda/launch.h"
#include "cuda/online_eviction.h"

namespace kvreplay {
namespace {

__global__ void place_given(HeldRows held_rows, const double* given_scores) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= held_rows.given) return;
  const std::size_t from = blockIdx.y * static_cast<std::size_t>(held_rows.given) + static_cast<std::size_t>(i);
  const std::size_t to = blockIdx.y * static_cast<std::size_t>(held_rows.capacity) + static_cast<std::size_t>(i);
  held_rows.positions[to] = held_rows.resident[from];
  held_rows.scores[to] = given_scores[from];
}

constexpr int split_slots = 256;  // that one block of products takes

/// Rows of query heads [first_head, first_head + heads), of one KV head, against that head's held keys.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::threads, Tiles::blocks_a_processor)
    held_logits(AttentionTask task, HeldRows held_rows, int heads, int held, int token, int steps, float* logits) {
  const int first_head = static_cast<int>(blockIdx.z) * heads;
  const int kv_head = first_head / task.group;
  const int row_count = steps * heads;
  const int first_row = static_cast<int>(blockIdx.x) * Tiles::rows;
  const std::int32_t* positions = held_rows.positions + static_cast<std::size_t>(first_head / held_rows.heads) *
                                                            static_cast<std::size_t>(held_rows.capacity);
  const int slots = held + steps;
  const int first_slot = static_cast<int>(blockIdx.y) * split_slots;
  const int end_slot = min(slots, first_slot + split_slots);

  float* out[Tiles::row_count];
#pragma unroll
  for (int i = 0; i < Tiles::row_count; ++i) {
    const int row = first_row + Tiles::row(i);
    const auto of_head = static_cast<std::size_t>(first_head + row % heads) * static_cast<std::size_t>(steps);
    out[i] = row < row_count ? logits + (of_head + static_cast<std::size_t>(row / heads)) *
                                            static_cast<std::size_t>(held_rows.capacity)
                             : nullptr;
  }

  const void* keys = task.keys[kv_head];
  Tiles tiles;
  tiles.hold(keys, [&](int i) -> const void* {
    const int row = first_row + i;
    if (row >= row_count) return nullptr;
    const int query = token - held_rows.first + row / heads;
    return row_at(task.queries[first_head + row % heads], task.rows[query], Tiles::row_bytes);
  });
  tiles.stream(
      keys,
      [&](int tile, int column) -> const void* {
        const int slot = tile * Tiles::columns + column;
        if (slot >= end_slot) return nullptr;
        return row_at(keys, slot < held ? positions[slot] : token + slot - held, Tiles::row_bytes);
      },
      first_slot / Tiles::columns, [&](int tile) { return (tile + 1) * Tiles::columns < end_slot ? tile + 1 : -1; },
      [&](int tile, typename Tiles::Sums& sums) {
        const float scale = apply_cap<Tiles>(task, sums);
#pragma unroll
        for (int i = 0; i < Tiles::row_count; ++i) {
          if (out[i] == nullptr) continue;
#pragma unroll
          for (int j = 0; j < Tiles::column_count; ++j) {
            const int slot = tile * Tiles::columns + Tiles::column(j);
            if (slot < end_slot) out[i][slot] = scale * Tiles::at(sums, i, j);
          }
        }
      });
}

constexpr int least_threads = 64;
constexpr int most_threads = 1024;
constexpr int most_warps = most_threads / 32;

struct Candidate {
  double score;
  int position;  // -1: none
};

/// The lower score goes, of equal ones the higher position.
__device__ __forceinline__ bool goes_before(const Candidate& a, const Candidate& b) {
  if (a.position < 0 || b.position < 0) return b.position < 0 && a.position >= 0;
  return a.score < b.score || (a.score == b.score && a.position > b.position);
}

/// Of all lanes.
__device__ __forceinline__ Candidate first_to_go(Candidate mine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const Candidate other{__shfl_xor_sync(~0U, mine.score, lanes), __shfl_xor_sync(~0U, mine.position, lanes)};
    if (goes_before(other, mine)) mine = other;
  }
  return mine;
}

/// The first of the newest tokens that never go, when `now` has come and more are held.
__device__ __forceinline__ int first_of_newest(const HeldRows& held_rows, std::size_t row, int now) {
  const int recent = held_rows.recents[now];
  const int given_among = recent - (now - held_rows.first + 1);
  if (given_among <= 0) return now - recent + 1;
  return held_rows.resident[row * static_cast<std::size_t>(held_rows.given) +
                            static_cast<std::size_t>(held_rows.given - given_among)];
}

/// Σ 2^(x - reference) over some slots; the reference is an integer.
struct PartialSum {
  double sum;
  float reference;
};

/// 2^(x - reference); 0 where there is nothing to see.
__device__ __forceinline__ float exponential(float x, float reference) {
  return x == -INFINITY ? 0.0F : exp2_fast(x - reference);
}

/// One row as a block of threads works on it.
struct Row {
  const HeldRows& held_rows;
  std::size_t number;
  const float* logits;  // [heads, steps, capacity]
  int steps;
  std::int32_t* positions;  // of the slots; -1: nothing is held there
  double* scores;
  std::int32_t* evicted;  // [tokens]

  __device__ __forceinline__ const float* logits_of(int head, int step) const {
    return logits +
           (static_cast<std::size_t>(head) * static_cast<std::size_t>(steps) + static_cast<std::size_t>(step)) *
               static_cast<std::size_t>(held_rows.capacity);
  }
};

/// totals[heads]: sums of exponentials over the slots that the query at `now` sees. A head's slots are shared out to
/// some warps, `warps_a_head`, with partials[heads, warps_a_head]. Whether this thread's logits are finite.
__device__ __forceinline__ bool sum_exponentials(const Row& row, int step, int now, int slots, int warps_a_head,
                                                 PartialSum* partials, PartialSum* totals) {
  const auto threads = static_cast<int>(blockDim.x);
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int heads = row.held_rows.heads;
  const int heads_at_once = threads / 32 / warps_a_head;
  const int lowest_seen = row.held_rows.lowest_seen[now];
  const auto logit = [&](const float* of_head, int slot) {
    const float x = of_head[slot];
    return row.positions[slot] >= lowest_seen ? x : -INFINITY;
  };
  bool finite = true;
  for (int first = 0; first < heads; first += heads_at_once) {
    const int head = first + warp / warps_a_head;
    const bool works = warp / warps_a_head < heads_at_once && head < heads;
    const float* of_head = row.logits_of(min(head, heads - 1), step);
    const int first_slot = warp % warps_a_head * 32 + lane();
    float highest = -INFINITY;
    for (int slot = first_slot; works && slot < slots; slot += 32 * warps_a_head) {
      const float x = logit(of_head, slot);
      if (row.positions[slot] >= lowest_seen && !(fabsf(x) < INFINITY)) finite = false;
      highest = fmaxf(highest, x);
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0U, highest, lanes));
    const float reference = ceilf(highest);
    double sum = 0.0;
    for (int slot = first_slot; works && slot < slots; slot += 32 * warps_a_head)
      sum += static_cast<double>(exponential(logit(of_head, slot), reference));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0U, sum, lanes);
    if (works && lane() == 0) partials[head * warps_a_head + warp % warps_a_head] = {sum, reference};
  }
  __syncthreads();
  const double* sink_logits = row.held_rows.sink_logits;  // of the row's heads
  if (sink_logits != nullptr) sink_logits += row.number * static_cast<std::size_t>(heads);
  for (int head = thread; head < heads; head += threads) {
    const PartialSum* mine = partials + head * warps_a_head;
    PartialSum total{0.0, -INFINITY};
    for (int i = 0; i < warps_a_head; ++i) total.reference = fmaxf(total.reference, mine[i].reference);
    for (int i = 0; i < warps_a_head; ++i)
      total.sum += mine[i].sum * static_cast<double>(exponential(mine[i].reference, total.reference));
    if (sink_logits != nullptr) total.sum += sink_weight(sink_logits[head], static_cast<double>(total.reference));
    totals[head] = total;
  }
  __syncthreads();
  return finite;
}

/// The mean attention over heads is added to the scores, or takes their place.
__device__ __forceinline__ void add_attention(const Row& row, int step, int now, int slots, const PartialSum* totals) {
  const int heads = row.held_rows.heads;
  const int lowest_seen = row.held_rows.lowest_seen[now];
  for (int slot = static_cast<int>(threadIdx.x); slot < slots; slot += static_cast<int>(blockDim.x)) {
    if (!row.held_rows.accumulate) row.scores[slot] = 0.0;
    if (row.positions[slot] < lowest_seen) continue;
    double shares = 0.0;
    for (int head = 0; head < heads; ++head) {
      const PartialSum total = totals[head];
      shares += static_cast<double>(
          __fdiv_rn(exponential(row.logits_of(head, step)[slot], total.reference), static_cast<float>(total.sum)));
    }
    row.scores[slot] += shares / static_cast<double>(heads);
  }
}

/// The lowest score is evicted; sinks and recent tokens are protected.
__device__ __forceinline__ void evict_lowest(const Row& row, int now, int slots, Candidate (&candidates)[most_warps]) {
  const auto threads = static_cast<int>(blockDim.x);
  const auto thread = static_cast<int>(threadIdx.x);
  const int begin = min(row.held_rows.sinks, now), end = first_of_newest(row.held_rows, row.number, now);
  Candidate lowest{0.0, -1};
  int its_slot = -1;
  for (int slot = thread; slot < slots; slot += threads) {
    const Candidate one{row.scores[slot], row.positions[slot]};
    if (one.position < begin || one.position >= end || !goes_before(one, lowest)) continue;
    lowest = one;
    its_slot = slot;
  }
  const int mine = lowest.position;
  lowest = first_to_go(lowest);
  if (lane() == 0) candidates[thread / 32] = lowest;
  __syncthreads();
  lowest = first_to_go(lane() < threads / 32 ? candidates[lane()] : Candidate{0.0, -1});
  if (its_slot >= 0 && mine == lowest.position) {
    row.positions[its_slot] = -1;
    row.evicted[mine] = now;
  }
  __syncthreads();
}

/// Those that are left move up, in their order.
__device__ __forceinline__ void move_up(const Row& row, int slots, int (&counts)[most_warps]) {
  const auto threads = static_cast<int>(blockDim.x);
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  int filled = 0;
  for (int begin = 0; begin < slots; begin += threads) {
    const int slot = begin + thread;
    const int position = slot < slots ? row.positions[slot] : -1;
    const double score = position >= 0 ? row.scores[slot] : 0.0;
    const unsigned stays = __ballot_sync(~0U, position >= 0);
    if (lane() == 0) counts[warp] = __popc(stays);
    __syncthreads();
    int to = filled + __popc(stays & ((1U << lane()) - 1U));
    for (int other = 0; other < threads / 32; ++other) {
      if (other < warp) to += counts[other];
      filled += counts[other];
    }
    if (position >= 0) {
      row.positions[to] = position;
      row.scores[to] = score;
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(most_threads)
    steps_of_rows(HeldRows held_rows, int held, int token, int steps, const float* logits, int* bad) {
  __shared__ Candidate candidates[most_warps];
  __shared__ int counts[most_warps];
  const auto threads = static_cast<int>(blockDim.x);
  const int heads = held_rows.heads;
  const int warps_a_head = max(1, threads / 32 / heads);
  auto* partials = dynamic_shared<PartialSum>();         // [heads, warps_a_head]
  PartialSum* totals = partials + heads * warps_a_head;  // [heads]

  const auto number = static_cast<std::size_t>(blockIdx.x);
  const auto capacity = static_cast<std::size_t>(held_rows.capacity);
  const Row row{held_rows,
                number,
                logits + number * static_cast<std::size_t>(heads) * static_cast<std::size_t>(steps) * capacity,
                steps,
                held_rows.positions + number * capacity,
                held_rows.scores + number * capacity,
                held_rows.evicted + number * static_cast<std::size_t>(held_rows.tokens)};
  for (int step = static_cast<int>(threadIdx.x); step < steps; step += threads) {
    row.positions[held + step] = token + step;
    row.scores[held + step] = 0.0;
  }
  __syncthreads();

  int count = held;
  bool finite = true;
  for (int step = 0; step < steps; ++step) {
    const int slots = held + step + 1;
    const int now = token + step;
    finite = sum_exponentials(row, step, now, slots, warps_a_head, partials, totals) && finite;
    add_attention(row, step, now, slots, totals);
    for (++count; count > held_rows.budgets[now]; --count) evict_lowest(row, now, slots, candidates);
  }
  if (!finite) *bad = 1;
  move_up(row, held + steps, counts);
}

}  // namespace

void begin_rows(const HeldRows& held_rows, const double* given_scores, cudaStream_t stream) {
  if (held_rows.given == 0) return;
  constexpr int threads = 256;
  const dim3 blocks(blocks_for(static_cast<std::size_t>(held_rows.given), threads),
                    static_cast<unsigned>(held_rows.rows));
  launch(place_given, blocks, threads, 0, stream, held_rows, given_scores);
}

void write_held_logits(const ProductForm& form, const AttentionTask& task, const HeldRows& held_rows, int held,
                       int token, int steps, float* logits, cudaStream_t stream) {
  // Rows of several KV heads are those of the layer, KV head by KV head.
  const int heads = std::min(held_rows.heads, task.group);
  with_tiles(form, [&]<class Tiles>() {
    const dim3 blocks(blocks_for(static_cast<std::size_t>(steps * heads), Tiles::rows),
                      blocks_for(static_cast<std::size_t>(held + steps), split_slots),
                      static_cast<unsigned>(task.kv_heads * task.group / heads));
    launch(held_logits<Tiles>, blocks, Tiles::threads, Tiles::shared_bytes, stream, task, held_rows, heads, held, token,
           steps, logits);
  });
}

void take_steps(const HeldRows& held_rows, int held, int token, int steps, const float* logits, int* bad,
                cudaStream_t stream) {
  // As many as there are tokens, so that bits do not depend on the device.
  const int most = std::max(held_rows.given, std::min(held_rows.budget, held_rows.tokens));
  const int threads = std::clamp((most + 31) / 32 * 32, least_threads, most_threads);
  const int warps = threads / 32;
  const std::size_t partials = static_cast<std::size_t>(held_rows.heads * std::max(1, warps / held_rows.heads));
  launch(steps_of_rows, dim3(static_cast<unsigned>(held_rows.rows)), threads,
         (partials + static_cast<std::size_t>(held_rows.heads)) * sizeof(PartialSum), stream, held_rows, held, token,
         steps, logits, bad);
}

}  // namespace kvreplay
