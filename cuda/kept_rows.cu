// Sums of exponentials over what each set holds of a row: every set reads the row's logits under its mask. Each section
// of the keys has the largest logit that the set holds there for its reference, so no sum is lost beside another.
#include <algorithm>
#include <numbers>

#include "cuda/held_keys.h"
#include "cuda/launch.h"
#include "cuda/tiles.h"

namespace kvreplay {
namespace {

constexpr int threads = 256;
constexpr int warps = threads / 32;
constexpr int chunk_keys = 1024;  // a word for each lane
constexpr int sets_a_block = 64;  // the first of them keeps everything
constexpr unsigned all_lanes = ~0U;

struct SectionSums {
  MaskedSums weights;
  double unaligned = 0.0;  // of weights, and of weights around the reference of the whole row
  float highest = -INFINITY;

  /// A whole number, for other references to be an exact factor away.
  __device__ __forceinline__ float reference() const { return ceilf(highest); }
};

/// Of one set: the first tokens, the others below the boundary, those from it on.
struct HeldSums {
  SectionSums sections[3];
  double logit_square = 0.0;
  int held = 0;  // keys below those under way

  __device__ __forceinline__ float reference() const {
    return fmaxf(fmaxf(sections[0].reference(), sections[1].reference()), sections[2].reference());
  }
  __device__ __forceinline__ RowSums sums(double sink_logit) const {
    const auto around = [](const SectionSums& section, float reference) -> MaskedSums {
      const double factor = whole_power_of_two(section.reference() - reference);
      return {section.weights.sum * factor, section.weights.square * factor * factor};
    };
    RowSums sums;
    sums.sinks = around(sections[0], reference());
    sums.rest = around(sections[1], reference());
    sums.later = around(sections[2], reference());
    sums.sink_logit = sink_weight(sink_logit, static_cast<double>(reference()));
    return sums;
  }
};

/// Which of a row's sets a block has: of `count`, number i.
struct BlockSets {
  int first;
  int count;

  __device__ __forceinline__ explicit BlockSets(int sets)
      : first(static_cast<int>(blockIdx.y) * (sets_a_block - 1)), count(min(sets_a_block, sets - first)) {}
  __device__ __forceinline__ int set(int i) const { return i == 0 ? 0 : first + i; }
  /// The first block alone speaks for everything.
  __device__ __forceinline__ bool writes(int i) const { return i > 0 || first == 0; }
};

/// consume(section, i, first key, word): a warp at a time, a word of 32 keys for each lane; the logits of these keys
/// lie in `chunk`.
template <class Consume>
__device__ __forceinline__ void over_held_keys(const KeptRows& rows, const KeptRow& row, const BlockSets& sets,
                                               float* chunk, Consume consume) {
  const float* logits = logits_of(rows, row);
  const int sinks = min(sink_tokens, rows.boundary);
  for (int section = 0; section < 3; ++section) {
    const int begin = max(row.visible.x, section == 0 ? 0 : section == 1 ? sinks : rows.boundary);
    const int end = min(row.visible.y, section == 0 ? sinks : section == 1 ? rows.boundary : rows.task.key_count);
    for (int first = begin / chunk_keys * chunk_keys; first < end; first += chunk_keys) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < chunk_keys; i += threads)
        if (first + i >= begin && first + i < end) chunk[i] = logits[first + i];
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x) / 32; i < sets.count; i += warps)
        consume(section, i, held_word(rows, row, sets.set(i), first + 32 * lane(), begin, end));
    }
  }
  __syncthreads();
}

/// Calls of_word(number, bits) with the words of a warp's lanes that are not 0.
template <class OfWord>
__device__ __forceinline__ void over_words(unsigned word, OfWord of_word) {
  for (unsigned some = __ballot_sync(all_lanes, word != 0); some != 0; some &= some - 1) {
    const int number = __ffs(static_cast<int>(some)) - 1;
    of_word(number, __shfl_sync(all_lanes, word, number));
  }
}

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(all_lanes, x, step);
  return x;
}

/// How many bits the lanes before this one have.
__device__ __forceinline__ int bits_before(unsigned word) {
  int count = __popc(word);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int of_lower = __shfl_up_sync(all_lanes, count, static_cast<unsigned>(step));
    if (lane() >= step) count += of_lower;
  }
  return count - __popc(word);
}

__global__ void __launch_bounds__(threads)
    held_sums(KeptRows rows, MomentParts parts, HeldState* states, Moments* moments) {
  const int rows_of_head = row_count(rows);
  const int number = static_cast<int>(blockIdx.x);
  const KeptRow row = kept_row(rows, number / rows_of_head, number % rows_of_head);
  const BlockSets sets(rows.sets);
  auto* held = dynamic_shared<HeldSums>();
  auto* chunk = reinterpret_cast<float*>(held + sets_a_block);
  for (int i = static_cast<int>(threadIdx.x); i < sets.count; i += threads) held[i] = HeldSums{};

  over_held_keys(rows, row, sets, chunk, [&](int section, int i, unsigned word) {
    float highest = -INFINITY;
    over_words(word, [&](int w, unsigned bits) {
      if ((bits >> lane() & 1U) != 0) highest = fmaxf(highest, chunk[32 * w + lane()]);
    });
#pragma unroll
    for (int step = 16; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(all_lanes, highest, step));
    if (lane() == 0) held[i].sections[section].highest = fmaxf(held[i].sections[section].highest, highest);
  });

  const float* logits = logits_of(rows, row);
  const float row_reference = held[0].reference();
  over_held_keys(rows, row, sets, chunk, [&](int section, int i, unsigned word) {
    SectionSums& mine = held[i].sections[section];
    const float reference = mine.reference();
    const bool ranked = parts.unaligned && section < 2;
    const int ranks = ranked ? held[i].held + bits_before(word) : 0;
    float sum = 0.0F, square = 0.0F, logit_square = 0.0F, unaligned = 0.0F;
    over_words(word, [&](int w, unsigned bits) {
      const int first_rank = ranked ? __shfl_sync(all_lanes, ranks, w) : 0;
      if ((bits >> lane() & 1U) == 0) return;
      const float x = chunk[32 * w + lane()];
      const float weight = exp2_fast(x - reference);
      sum += weight;
      square = __fmaf_rn(weight, weight, square);
      logit_square = __fmaf_rn(x, x, logit_square);
      if (ranked) {
        const int rank = first_rank + __popc(bits & ((1U << lane()) - 1U));
        unaligned = __fmaf_rn(weight, exp2_fast(logits[rank] - row_reference), unaligned);
      }
    });
    sum = sum_of_lanes(sum);
    square = sum_of_lanes(square);
    if (parts.logits && section < 2) logit_square = sum_of_lanes(logit_square);
    if (ranked) unaligned = sum_of_lanes(unaligned);
    __syncwarp();
    if (lane() == 31) {  // who knows all ranks
      mine.weights.sum += static_cast<double>(sum);
      mine.weights.square += static_cast<double>(square);
      if (parts.logits && section < 2) held[i].logit_square += static_cast<double>(logit_square);
      if (ranked) {
        mine.unaligned += static_cast<double>(unaligned);
        held[i].held = ranks + __popc(word);
      }
    }
  });

  const double sink_logit = sink_logit_of(rows, row);
  const RowSums full = held[0].sums(sink_logit);
  for (int i = static_cast<int>(threadIdx.x); i < sets.count; i += threads) {
    if (!sets.writes(i)) continue;
    const HeldSums& mine = held[i];
    const RowSums sums = mine.sums(sink_logit);
    const float reference = mine.reference();
    Moments made = moments_of(sums, full, whole_power_of_two(reference - row_reference));
    made.logit_square = mine.logit_square * std::numbers::ln2 * std::numbers::ln2;
    for (int section = 0; section < 2; ++section)
      made.unaligned_dot += mine.sections[section].unaligned *
                            whole_power_of_two(mine.sections[section].reference() - row_reference) /
                            (full.total() * full.total());
    const auto set_count = static_cast<std::size_t>(rows.sets);
    states[row_number(rows, row) * set_count + static_cast<std::size_t>(sets.set(i))] = {sums.total(), reference};
    moments[moments_at(rows, row, sets.set(i))] = made;
  }
}

}  // namespace

void add_held_sums(const KeptRows& rows, MomentParts parts, HeldState* states, Moments* moments, cudaStream_t stream) {
  const int row_blocks = rows.task.kv_heads * rows.queries * rows.task.group;
  const dim3 blocks(static_cast<unsigned>(row_blocks),
                    blocks_for(static_cast<std::size_t>(std::max(1, rows.sets - 1)), sets_a_block - 1));
  constexpr std::size_t shared_bytes = sets_a_block * sizeof(HeldSums) + chunk_keys * sizeof(float);
  launch(held_sums, blocks, threads, shared_bytes, stream, rows, parts, states, moments);
}

}  // namespace kvreplay
