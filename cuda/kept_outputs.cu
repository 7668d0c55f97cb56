// Outputs of what each set holds of a row, and how far they are from that of all: weights are made of logits where they
// are multiplied with values, over the keys alone that some row of a tile holds.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cuda/held_keys.h"
#include "cuda/launch.h"
#include "cuda/stored_types.h"
#include "cuda/tiles.h"
#include "cuda/widened.h"

namespace kvreplay {
namespace {

constexpr int threads = 128;
constexpr int tile_rows = 32;
constexpr int step_keys = 16;
// Sums are float32 within a window of the keys, float64 over a split's windows. Both begin at multiples of their size
// whatever is held, and a key that a row lacks has a weight of zero: a row has the same bits in any company.
constexpr int window_keys = 512;
constexpr int window_words = window_keys / 32;
constexpr int split_keys = 8192;
constexpr unsigned all_lanes = ~0U;

int splits_of(const KeptRows& rows) { return (rows.task.key_count + split_keys - 1) / split_keys; }

/// Row `i` of a tile, head by head: heads may hold different keys.
__device__ __forceinline__ KeptRow row_of_tile(const KeptRows& rows, int kv_head, int tile, int i) {
  const int number = tile * tile_rows + i;
  if (number >= row_count(rows)) return {kv_head, -1, 0, 0, make_int2(0, 0), -1};
  return kept_row(rows, kv_head, number % rows.queries * rows.task.group + number / rows.queries);
}

/// Four stored numbers, which come in one piece.
template <class Element>
using Four = std::conditional_t<sizeof(Element) == 2, uint2, uint4>;

/// partials[splits, rows, sets, depth]: sums of weight times value over the keys of a split.
template <class Element, int columns>
__global__ void __launch_bounds__(threads, 3)
    held_outputs(KeptRows rows, const void* const* values, int depth, const HeldState* states, double* partials) {
  constexpr int thread_rows = 4, thread_columns = columns / 16;
  constexpr int row_stride = tile_rows + 4;
  constexpr int filled_rows = tile_rows * step_keys / threads;     // weights that a thread makes in a step
  constexpr int filled_fours = columns * step_keys / 4 / threads;  // and values that it brings, four by four
  static_assert(threads == 8 * step_keys && threads / 32 * 8 == tile_rows);
  __shared__ KeptRow of_tile[tile_rows];
  __shared__ float references[tile_rows];
  __shared__ unsigned masks[tile_rows][window_words];
  __shared__ __align__(16) unsigned wanted[threads / 32][window_words];
  __shared__ int listed[window_keys];
  __shared__ __align__(16) float weights[step_keys][row_stride];
  __shared__ __align__(16) float numbers[step_keys][columns];

  const int column_tiles = depth / columns;
  const int tile = static_cast<int>(blockIdx.x) / column_tiles;
  const int first_column = static_cast<int>(blockIdx.x) % column_tiles * columns;
  const int set = static_cast<int>(blockIdx.y);
  const int kv_head = static_cast<int>(blockIdx.z) % rows.task.kv_heads;
  const int split = static_cast<int>(blockIdx.z) / rows.task.kv_heads;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;

  // A lane for each row; the keys that some row sees.
  if (warp == 0) {
    const KeptRow row = row_of_tile(rows, kv_head, tile, lane());
    of_tile[lane()] = row;
    float reference = 0.0F;
    if (row.row >= 0)
      reference =
          states[row_number(rows, row) * static_cast<std::size_t>(rows.sets) + static_cast<std::size_t>(set)].reference;
    references[lane()] = reference;
  }
  __syncthreads();
  int begin = rows.task.key_count, end = 0;
  if (of_tile[lane()].row >= 0) {
    begin = of_tile[lane()].visible.x;
    end = of_tile[lane()].visible.y;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    begin = min(begin, __shfl_xor_sync(all_lanes, begin, step));
    end = max(end, __shfl_xor_sync(all_lanes, end, step));
  }
  begin = max(begin / window_keys * window_keys, split * split_keys);
  end = min(end, (split + 1) * split_keys);

  const int first_row = warp / 2 * 16 + lane() / 8 * thread_rows;
  // What a thread fills: weights of one key and some rows, values of another key.
  constexpr int filled_apart = threads / step_keys;
  const int filled_row = thread / step_keys;
  const auto keys = static_cast<std::size_t>(rows.task.key_count);
  const float* logits =
      rows.logits + static_cast<std::size_t>(kv_head) * static_cast<std::size_t>(row_count(rows)) * keys;

  const auto column = [&](int j) { return warp % 2 * (columns / 2) + j / 4 * 32 + lane() % 8 * 4 + j % 4; };
  double wide_sums[thread_rows][thread_columns];
#pragma unroll
  for (int i = 0; i < thread_rows; ++i)
#pragma unroll
    for (int j = 0; j < thread_columns; ++j) wide_sums[i][j] = 0.0;

  for (int window = begin; window < end; window += window_keys) {
    unsigned some = 0;
    const int word = thread % window_words;
#pragma unroll
    for (int i = 0; i < filled_rows; ++i) {
      const unsigned held = held_word(rows, of_tile[filled_row + i * filled_apart], set, window + 32 * word, window,
                                      window + window_keys);
      masks[filled_row + i * filled_apart][word] = held;
      some |= held;
    }
    some |= __shfl_xor_sync(all_lanes, some, window_words);
    if (lane() < window_words) wanted[warp][word] = some;
    __syncthreads();

    // The keys that some row holds, in order; a thread has four.
    int count = 0, before = 0;
    unsigned mine = 0;
#pragma unroll
    for (int first = 0; first < window_words; first += 4) {
      uint4 four{0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < threads / 32; ++i) {
        const uint4 more = *reinterpret_cast<const uint4*>(&wanted[i][first]);
        four = make_uint4(four.x | more.x, four.y | more.y, four.z | more.z, four.w | more.w);
      }
      const unsigned bits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i == thread / 8) {
          mine = bits[i];
          before = count;
        }
        count += __popc(bits[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bit = thread % 8 * 4 + i;
      if ((mine >> bit & 1U) != 0) listed[before + __popc(mine & ((1U << bit) - 1U))] = thread * 4 + i;
    }
    __syncthreads();

    if (count == 0) continue;

    float found[filled_rows];
    Four<Element> brought[filled_fours];
    const auto fetch = [&](int first) {
      const int of_weight = first + thread % step_keys;
      const int key = of_weight < count ? listed[of_weight] : -1;
#pragma unroll
      for (int i = 0; i < filled_rows; ++i) {
        const int row = filled_row + i * filled_apart;
        const bool held = key >= 0 && (masks[row][key / 32] >> (key % 32) & 1U) != 0;
        found[i] =
            held ? logits[static_cast<std::size_t>(of_tile[row].row) * keys + static_cast<std::size_t>(window + key)]
                 : -INFINITY;
      }
      // Where the list has ended: the last vector once more, its weight is 0.
      const int of_value = listed[min(first + thread / 8, count - 1)];
      const auto* vector = static_cast<const Four<Element>*>(values[kv_head]) +
                           (static_cast<std::size_t>(window + of_value) * static_cast<std::size_t>(depth) +
                            static_cast<std::size_t>(first_column)) /
                               4;
#pragma unroll
      for (int i = 0; i < filled_fours; ++i) brought[i] = vector[thread % 8 + 8 * i];
    };
    const auto put = [&] {
#pragma unroll
      for (int i = 0; i < filled_rows; ++i)
        weights[thread % step_keys][filled_row + i * filled_apart] =
            exp2_fast(found[i] - references[filled_row + i * filled_apart]);
#pragma unroll
      for (int i = 0; i < filled_fours; ++i) {
        Element four[4];
        static_assert(sizeof four == sizeof brought[i]);
        memcpy(four, &brought[i], sizeof four);
        *reinterpret_cast<float4*>(&numbers[thread / 8][(thread % 8 + 8 * i) * 4]) =
            make_float4(widened(four[0]), widened(four[1]), widened(four[2]), widened(four[3]));
      }
    };

    float sums[thread_rows][thread_columns];
#pragma unroll
    for (int i = 0; i < thread_rows; ++i)
#pragma unroll
      for (int j = 0; j < thread_columns; ++j) sums[i][j] = 0.0F;
    fetch(0);
    for (int first = 0; first < count; first += step_keys) {
      put();
      __syncthreads();
      // The next step's numbers are on their way meanwhile.
      fetch(first + step_keys);
#pragma unroll
      for (int k = 0; k < step_keys; ++k) {
        const float4 four = *reinterpret_cast<const float4*>(&weights[k][first_row]);
        const float a[thread_rows] = {four.x, four.y, four.z, four.w};
        float b[thread_columns];
#pragma unroll
        for (int j = 0; j < thread_columns; j += 4) {
          const float4 of_columns = *reinterpret_cast<const float4*>(&numbers[k][column(j)]);
          b[j] = of_columns.x;
          b[j + 1] = of_columns.y;
          b[j + 2] = of_columns.z;
          b[j + 3] = of_columns.w;
        }
#pragma unroll
        for (int i = 0; i < thread_rows; ++i)
#pragma unroll
          for (int j = 0; j < thread_columns; ++j) sums[i][j] = __fmaf_rn(a[i], b[j], sums[i][j]);
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < thread_rows; ++i)
#pragma unroll
      for (int j = 0; j < thread_columns; ++j) wide_sums[i][j] += static_cast<double>(sums[i][j]);
  }

  const std::size_t all_rows = static_cast<std::size_t>(rows.task.kv_heads) * static_cast<std::size_t>(row_count(rows));
#pragma unroll
  for (int i = 0; i < thread_rows; ++i) {
    const KeptRow& row = of_tile[first_row + i];
    if (row.row < 0) continue;
    const std::size_t number = static_cast<std::size_t>(split) * all_rows + row_number(rows, row);
    double* out = partials +
                  (number * static_cast<std::size_t>(rows.sets) + static_cast<std::size_t>(set)) *
                      static_cast<std::size_t>(depth) +
                  first_column;
#pragma unroll
    for (int j = 0; j < thread_columns; ++j) out[column(j)] = wide_sums[i][j];
  }
}

constexpr int comparing_threads = 256;
constexpr int largest_depth = 256;

__global__ void compare_outputs(KeptRows rows, int splits, int depth, const HeldState* states, const double* partials,
                                Moments* moments, KeptOutputs outputs) {
  __shared__ double of_all[largest_depth];
  const int rows_of_head = row_count(rows);
  const int number = static_cast<int>(blockIdx.x);
  const KeptRow row = kept_row(rows, number / rows_of_head, number % rows_of_head);
  const auto output = [&](int set, int c) {
    double sum = 0.0;
    for (int split = 0; split < splits; ++split) {
      const std::size_t of_row =
          static_cast<std::size_t>(split) * static_cast<std::size_t>(gridDim.x) + static_cast<std::size_t>(number);
      sum += partials[(of_row * static_cast<std::size_t>(rows.sets) + static_cast<std::size_t>(set)) *
                          static_cast<std::size_t>(depth) +
                      static_cast<std::size_t>(c)];
    }
    return sum / states[static_cast<std::size_t>(number) * static_cast<std::size_t>(rows.sets) +
                        static_cast<std::size_t>(set)]
                     .total;
  };
  for (int c = static_cast<int>(threadIdx.x); c < depth; c += comparing_threads) of_all[c] = output(0, c);
  __syncthreads();
  for (int set = static_cast<int>(threadIdx.x) / 32; set < rows.sets; set += comparing_threads / 32) {
    double square = 0.0, dot = 0.0, error_square = 0.0;
    float* vector = outputs.vectors == nullptr
                        ? nullptr
                        : outputs.vectors + moments_at(rows, row, set) * static_cast<std::size_t>(outputs.dim);
    for (int c = lane(); c < depth; c += 32) {
      const double of_set = output(set, c);
      const double error = of_all[c] - of_set;
      if (vector != nullptr && c < outputs.dim) vector[c] = static_cast<float>(set == 0 ? of_set : of_set - of_all[c]);
      square += of_set * of_set;
      dot += of_all[c] * of_set;
      error_square += error * error;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      square += __shfl_xor_sync(all_lanes, square, step);
      dot += __shfl_xor_sync(all_lanes, dot, step);
      error_square += __shfl_xor_sync(all_lanes, error_square, step);
    }
    if (lane() == 0) {
      Moments& made = moments[moments_at(rows, row, set)];
      made.output_square = square;
      made.output_dot = dot;
      made.error_square = error_square;
    }
  }
}

}  // namespace

std::size_t output_partials(const KeptRows& rows, int depth) {
  return static_cast<std::size_t>(splits_of(rows)) * static_cast<std::size_t>(rows.task.kv_heads) *
         static_cast<std::size_t>(rows.queries) * static_cast<std::size_t>(rows.task.group) *
         static_cast<std::size_t>(rows.sets) * static_cast<std::size_t>(depth);
}

void add_outputs(const KeptRows& rows, DType type, int depth, const void* const* values, const HeldState* states,
                 double* partials, Moments* moments, KeptOutputs outputs, cudaStream_t stream) {
  const int splits = splits_of(rows);
  const unsigned tiles = blocks_for(static_cast<std::size_t>(rows.queries * rows.task.group), tile_rows);
  const auto launch_with = [&]<class Element, int columns>() {
    const dim3 blocks(tiles * static_cast<unsigned>(depth / columns), static_cast<unsigned>(rows.sets),
                      static_cast<unsigned>(splits * rows.task.kv_heads));
    launch(held_outputs<Element, columns>, blocks, threads, 0, stream, rows, values, depth, states, partials);
  };
  with_element(type, [&]<class Element>() {
    if (depth == 64) {
      launch_with.template operator()<Element, 64>();
    } else {
      launch_with.template operator()<Element, 128>();
    }
  });
  const dim3 row_blocks(static_cast<unsigned>(rows.task.kv_heads * rows.queries * rows.task.group));
  launch(compare_outputs, row_blocks, comparing_threads, 0, stream, rows, splits, depth, states, partials, moments,
         outputs);
}

}  // namespace kvreplay
