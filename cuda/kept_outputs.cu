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

/// Which keys of a window the rows of a tile hold.
struct HeldWindow {
  unsigned masks[tile_rows][window_words];  // of each row: the keys that it holds
  __align__(16) unsigned wanted[threads / 32][window_words];
  int listed[window_keys];  // the keys that some row holds, in order
};

/// Fills the window that begins at key `begin`, with all threads of the block; the number of listed keys.
__device__ __forceinline__ int list_held_keys(const KeptRows& rows, const KeptRow (&of_tile)[tile_rows], int set,
                                              int begin, HeldWindow& window) {
  constexpr int rows_apart = threads / window_words;
  const int thread = static_cast<int>(threadIdx.x);
  const int word = thread % window_words;
  unsigned some = 0;
#pragma unroll
  for (int i = 0; i < tile_rows / rows_apart; ++i) {
    const int row = thread / window_words + i * rows_apart;
    const unsigned held = held_word(rows, of_tile[row], set, begin + 32 * word, begin, begin + window_keys);
    window.masks[row][word] = held;
    some |= held;
  }
  some |= __shfl_xor_sync(all_lanes, some, window_words);
  if (lane() < window_words) window.wanted[thread / 32][word] = some;
  __syncthreads();

  // A thread has four of the listed keys.
  int count = 0, before = 0;
  unsigned mine = 0;
#pragma unroll
  for (int first = 0; first < window_words; first += 4) {
    uint4 four{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < threads / 32; ++i) {
      const uint4 more = *reinterpret_cast<const uint4*>(&window.wanted[i][first]);
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
    if ((mine >> bit & 1U) != 0) window.listed[before + __popc(mine & ((1U << bit) - 1U))] = thread * 4 + i;
  }
  __syncthreads();
  return count;
}

/// sums[row, column] += weights[key, row] * numbers[key, column], over the keys of a step.
template <int thread_rows, int thread_columns, int row_stride, int columns, class Column>
__device__ __forceinline__ void multiply_step(const float (&weights)[step_keys][row_stride],
                                              const float (&numbers)[step_keys][columns], int first_row,
                                              const Column& column, float (&sums)[thread_rows][thread_columns]) {
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
}

/// The keys of a split that some row of a tile sees, from the beginning of a window; a lane for each row.
__device__ __forceinline__ int2 visible_keys(const KeptRows& rows, const KeptRow& row, int split) {
  int begin = rows.task.key_count, end = 0;
  if (row.row >= 0) {
    begin = row.visible.x;
    end = row.visible.y;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    begin = min(begin, __shfl_xor_sync(all_lanes, begin, step));
    end = max(end, __shfl_xor_sync(all_lanes, end, step));
  }
  return make_int2(max(begin / window_keys * window_keys, split * split_keys), min(end, (split + 1) * split_keys));
}

/// What a thread brings to a step: logits of one key and some rows, and numbers of another key's value, four by four.
template <class Element, int columns>
struct StepNumbers {
  static constexpr int rows = tile_rows * step_keys / threads;
  static constexpr int fours = columns * step_keys / 4 / threads;
  static constexpr int rows_apart = threads / step_keys;
  static_assert(threads == 8 * step_keys && threads / 32 * 8 == tile_rows);

  /// The step that begins with the `first` of the window's listed keys. `logits` and `values` are those of the window's
  /// first key; logits of a row lie `keys` numbers apart, values `depth`.
  __device__ __forceinline__ void fetch(const KeptRow (&of_tile)[tile_rows], const HeldWindow& held, int first,
                                        int count, const float* logits, std::size_t keys, const Four<Element>* values,
                                        int depth) {
    const auto thread = static_cast<int>(threadIdx.x);
    const int of_weight = first + thread % step_keys;
    const int key = of_weight < count ? held.listed[of_weight] : -1;
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const int row = thread / step_keys + i * rows_apart;
      const bool is_held = key >= 0 && (held.masks[row][key / 32] >> (key % 32) & 1U) != 0;
      x[i] = is_held ? logits[static_cast<std::size_t>(of_tile[row].row) * keys + static_cast<std::size_t>(key)]
                     : -INFINITY;
    }
    // Where the list has ended: the last vector once more, its weight is 0.
    const int of_value = held.listed[min(first + thread / 8, count - 1)];
    const Four<Element>* vector = values + static_cast<std::size_t>(of_value) * static_cast<std::size_t>(depth) / 4;
#pragma unroll
    for (int i = 0; i < fours; ++i) value[i] = vector[thread % 8 + 8 * i];
  }

  /// Weights and values where all threads of the block read them.
  template <int row_stride>
  __device__ __forceinline__ void put(const float (&references)[tile_rows], float (&weights)[step_keys][row_stride],
                                      float (&numbers)[step_keys][columns]) const {
    const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const int row = thread / step_keys + i * rows_apart;
      weights[thread % step_keys][row] = exp2_fast(x[i] - references[row]);
    }
#pragma unroll
    for (int i = 0; i < fours; ++i) {
      Element four[4];
      static_assert(sizeof four == sizeof value[i]);
      memcpy(four, &value[i], sizeof four);
      *reinterpret_cast<float4*>(&numbers[thread / 8][(thread % 8 + 8 * i) * 4]) =
          make_float4(widened(four[0]), widened(four[1]), widened(four[2]), widened(four[3]));
    }
  }

  float x[rows];
  Four<Element> value[fours];
};

/// partials[splits, rows, sets, depth]: sums of weight times value over the keys of a split.
template <class Element, int columns>
__global__ void __launch_bounds__(threads, 3)
    held_outputs(KeptRows rows, const void* const* values, int depth, const HeldState* states, double* partials) {
  constexpr int thread_rows = 4, thread_columns = columns / 16;
  constexpr int row_stride = tile_rows + 4;
  __shared__ KeptRow of_tile[tile_rows];
  __shared__ float references[tile_rows];
  __shared__ HeldWindow held;
  __shared__ __align__(16) float weights[step_keys][row_stride];
  __shared__ __align__(16) float numbers[step_keys][columns];

  const int column_tiles = depth / columns;
  const int tile = static_cast<int>(blockIdx.x) / column_tiles;
  const int first_column = static_cast<int>(blockIdx.x) % column_tiles * columns;
  const int set = static_cast<int>(blockIdx.y);
  const int kv_head = static_cast<int>(blockIdx.z) % rows.task.kv_heads;
  const int split = static_cast<int>(blockIdx.z) / rows.task.kv_heads;
  const int warp = static_cast<int>(threadIdx.x) / 32;

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
  const int2 visible = visible_keys(rows, of_tile[lane()], split);

  const int first_row = warp / 2 * 16 + lane() / 8 * thread_rows;
  const auto keys = static_cast<std::size_t>(rows.task.key_count);
  const float* logits =
      rows.logits + static_cast<std::size_t>(kv_head) * static_cast<std::size_t>(row_count(rows)) * keys;

  const auto column = [&](int j) { return warp % 2 * (columns / 2) + j / 4 * 32 + lane() % 8 * 4 + j % 4; };
  double wide_sums[thread_rows][thread_columns];
#pragma unroll
  for (int i = 0; i < thread_rows; ++i)
#pragma unroll
    for (int j = 0; j < thread_columns; ++j) wide_sums[i][j] = 0.0;

  for (int window = visible.x; window < visible.y; window += window_keys) {
    const int count = list_held_keys(rows, of_tile, set, window, held);
    if (count == 0) continue;

    const float* window_logits = logits + window;
    const auto* window_values =
        static_cast<const Four<Element>*>(values[kv_head]) +
        (static_cast<std::size_t>(window) * static_cast<std::size_t>(depth) + static_cast<std::size_t>(first_column)) /
            4;
    StepNumbers<Element, columns> step;
    float sums[thread_rows][thread_columns];
#pragma unroll
    for (int i = 0; i < thread_rows; ++i)
#pragma unroll
      for (int j = 0; j < thread_columns; ++j) sums[i][j] = 0.0F;
    step.fetch(of_tile, held, 0, count, window_logits, keys, window_values, depth);
    for (int first = 0; first < count; first += step_keys) {
      step.put(references, weights, numbers);
      __syncthreads();
      // The next step's numbers are on their way meanwhile.
      step.fetch(of_tile, held, first + step_keys, count, window_logits, keys, window_values, depth);
      multiply_step(weights, numbers, first_row, column, sums);
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
