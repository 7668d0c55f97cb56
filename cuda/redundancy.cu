// SCA's greedy choice in its incremental form: all similarities at once, then step after step on one block. They are
// integers made as the CPU backend makes them, so that what is chosen is the same bit for bit.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "cuda/device_call.h"
#include "cuda/keys_at_slots.h"
#include "cuda/launch.h"
#include "cuda/stored_types.h"
#include "cuda/tiles.h"
#include "cuda/token_vectors.h"
#include "cuda/widened.h"
#include "error.h"

namespace kvreplay {
namespace {

constexpr std::int32_t highest_similarity = std::numeric_limits<std::int32_t>::max();
// Beyond any Add, and far enough from the ends of 64 bits for what is still added to those that have joined.
constexpr std::int64_t joined_excess = std::int64_t{1} << 62;
// A display that hangs on the device waits for a launch to end.
constexpr int steps_a_launch = 256;

// ---- similarities

constexpr int scale_threads = 256;
constexpr int product_threads = 128;
constexpr int tile_tokens = 64;  // rows and columns of a tile
constexpr int chunk_depth = 16;
constexpr int thread_rows = 8;
constexpr int thread_columns = 4;

__device__ __forceinline__ double widened(double x) { return x; }

/// sum + x * y, product and sum rounded one after the other. The product of two numbers of float32 is exact.
template <class Element>
__device__ __forceinline__ double add_product(double sum, double x, double y) {
  return std::is_same_v<Element, double> ? __dadd_rn(sum, __dmul_rn(x, y)) : __fma_rn(x, y, sum);
}

/// scales[token] = 2^15 / |w|, 0 of a zero vector: a warp a token, number by number.
template <class Element>
__global__ void find_scales(TokenVectors vectors, double* scales, int* bad) {
  const auto token = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  if (token >= vectors.tokens) return;  // all lanes of a warp
  double square = 0.0;
  for (int head = 0; head < vectors.head_count; ++head) {
    const Element* row = vectors.row<Element>(head, token);
    for (int begin = 0; begin < vectors.depth; begin += 32) {
      const int c = begin + lane();
      const double x = c < vectors.depth ? static_cast<double>(widened(row[c])) : 0.0;
      const double x_squared = __dmul_rn(x, x);
      for (int i = 0; i < 32; ++i) square = __dadd_rn(square, __shfl_sync(~0U, x_squared, i));
    }
  }
  if (lane() != 0) return;
  if (!(square < INFINITY)) *bad = 1;
  const double length = sqrt(square);
  scales[token] = length > 0.0 ? 0x1p15 / length : 0.0;
}

/// similarities[i, j] and [j, i] = rint(products * scales), sums taken number by number; a tile of the lower triangle a
/// block. Rows are `stride` apart, a multiple of tile_tokens.
template <class Element>
__global__ void __launch_bounds__(product_threads)
    store_similarities(TokenVectors vectors, const double* scales, int stride, std::int32_t* similarities) {
  if (blockIdx.x > blockIdx.y) return;
  __shared__ __align__(16) double rows[chunk_depth][tile_tokens + 2];
  __shared__ __align__(16) double columns[chunk_depth][tile_tokens + 2];
  const int first_row = static_cast<int>(blockIdx.y) * tile_tokens;
  const int first_column = static_cast<int>(blockIdx.x) * tile_tokens;
  const auto thread = static_cast<int>(threadIdx.x);
  constexpr int columns_of_threads = tile_tokens / thread_columns;
  const int row = thread / columns_of_threads * thread_rows;
  const int column = thread % columns_of_threads * thread_columns;

  double sums[thread_rows][thread_columns];
#pragma unroll
  for (int i = 0; i < thread_rows; ++i)
#pragma unroll
    for (int j = 0; j < thread_columns; ++j) sums[i][j] = 0.0;
  for (int head = 0; head < vectors.head_count; ++head) {
    for (int begin = 0; begin < vectors.depth; begin += chunk_depth) {
      __syncthreads();
      const auto put = [&](int first, double(&to)[chunk_depth][tile_tokens + 2]) {
        const int c = thread % chunk_depth;
#pragma unroll
        for (int i = thread / chunk_depth; i < tile_tokens; i += product_threads / chunk_depth)
          to[c][i] = first + i < vectors.tokens
                         ? static_cast<double>(widened(vectors.row<Element>(head, first + i)[begin + c]))
                         : 0.0;
      };
      put(first_row, rows);
      put(first_column, columns);
      __syncthreads();
#pragma unroll 4
      for (int c = 0; c < chunk_depth; ++c) {
        double a[thread_rows], b[thread_columns];
#pragma unroll
        for (int i = 0; i < thread_rows; ++i) a[i] = rows[c][row + i];
#pragma unroll
        for (int j = 0; j < thread_columns; ++j) b[j] = columns[c][column + j];
#pragma unroll
        for (int i = 0; i < thread_rows; ++i)
#pragma unroll
          for (int j = 0; j < thread_columns; ++j) sums[i][j] = add_product<Element>(sums[i][j], a[i], b[j]);
      }
    }
  }

  const auto scale_of = [&](int token) { return token < vectors.tokens ? scales[token] : 0.0; };
  double column_scales[thread_columns];
#pragma unroll
  for (int j = 0; j < thread_columns; ++j) column_scales[j] = scale_of(first_column + column + j);
  std::int32_t found[thread_rows][thread_columns];
#pragma unroll
  for (int i = 0; i < thread_rows; ++i) {
    const double scale = scale_of(first_row + row + i);
#pragma unroll
    for (int j = 0; j < thread_columns; ++j)
      found[i][j] = __double2int_rn(__dmul_rn(sums[i][j], __dmul_rn(scale, column_scales[j])));
  }
  const auto at = [&](int i, int j) {
    return similarities + static_cast<std::size_t>(i) * static_cast<std::size_t>(stride) + static_cast<std::size_t>(j);
  };
#pragma unroll
  for (int i = 0; i < thread_rows; ++i)
    if (first_row + row + i < vectors.tokens)
      *reinterpret_cast<int4*>(at(first_row + row + i, first_column + column)) =
          make_int4(found[i][0], found[i][1], found[i][2], found[i][3]);
  if (blockIdx.x == blockIdx.y) return;
#pragma unroll
  for (int j = 0; j < thread_columns; ++j)
#pragma unroll
    for (int i = 0; i < thread_rows; i += 4)
      *reinterpret_cast<int4*>(at(first_column + column + j, first_row + row + i)) =
          make_int4(found[i][j], found[i + 1][j], found[i + 2][j], found[i + 3][j]);
}

// ---- the choice

constexpr int most_matrices = 2;
constexpr int most_threads = 1024;
// Tokens of a thread whose numbers are on their way at the same time.
constexpr int tokens_at_once = 4;

/// What one matrix of similarities has to do with Add(j) = Σ_{i in R} max(0, S_ij − red_i) + max_{i in R} S_ij.
struct Redundancy {
  const std::int32_t* similarities;  // [tokens, stride]
  std::int32_t* red;                 // [tokens] of members; nothing exceeds that of the others, and of one alone
  std::int32_t* highest;             // [tokens] max of S_ij over the members
};

/// A member whose red rises from `low` to `high`: clamp(S, low, high) - low leaves its part of the sum.
struct Rise {
  const std::int32_t* row;
  std::int32_t low;
  std::int32_t high;
};

struct Choice {
  Redundancy matrices[most_matrices];
  int count;
  int tokens;
  int stride;
  int sinks;
  int recent;
  bool greatest;
  std::int64_t* excess;  // [tokens] the sum over matrices and members
  Rise* rises;           // [count, tokens] of one step
  std::int32_t* joined;  // [keep] who has joined, in this order
  std::int32_t* next;    // who joins next
};

__device__ __forceinline__ std::int64_t excess_of(std::int32_t s, std::int32_t low, std::int32_t high) {
  return static_cast<std::int64_t>(min(max(s, low), high)) - low;
}

/// The lower redundancy, of equal ones the lower token.
struct Candidate {
  std::int64_t redundancy;
  int token;
};
__device__ __forceinline__ Candidate better(const Candidate& a, const Candidate& b) {
  const bool second = b.redundancy < a.redundancy || (b.redundancy == a.redundancy && b.token < a.token);
  return second ? b : a;
}
__device__ __forceinline__ Candidate best_of_warp(Candidate mine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    mine = better(mine, {__shfl_xor_sync(~0U, mine.redundancy, distance), __shfl_xor_sync(~0U, mine.token, distance)});
  return mine;
}
__device__ __forceinline__ Candidate nobody() { return {std::numeric_limits<std::int64_t>::max(), 0}; }

__global__ void begin_choice(Choice choice) {
  const int token = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (token >= choice.tokens) return;
  choice.excess[token] = 0;
#pragma unroll
  for (int m = 0; m < most_matrices; ++m) {
    if (m >= choice.count) continue;
    choice.matrices[m].red[token] = highest_similarity;
    choice.matrices[m].highest[token] = std::numeric_limits<std::int32_t>::min();
  }
}

/// Lists the members whose red the newcomer raises, and raises it; their number. With all threads of the block.
__device__ __forceinline__ int raise_members(const Choice& choice, const std::int32_t* const (&joining)[most_matrices],
                                             int (&rises_of_warps)[32]) {
  const auto threads = static_cast<int>(blockDim.x);
  const auto thread = static_cast<int>(threadIdx.x);
  int rises = 0;
#pragma unroll
  for (int m = 0; m < most_matrices; ++m) {
    if (m >= choice.count) continue;
#pragma unroll 4
    for (int j = thread; j < choice.tokens; j += threads) rises += joining[m][j] > choice.matrices[m].red[j] ? 1 : 0;
  }
  int up_to_here = rises;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int lower = __shfl_up_sync(~0U, up_to_here, static_cast<unsigned>(distance));
    if (lane() >= distance) up_to_here += lower;
  }
  if (lane() == 31) rises_of_warps[thread / 32] = up_to_here;
  __syncthreads();
  int place = up_to_here - rises;
  int all_rises = 0;
  for (int w = 0; w < threads / 32; ++w) {
    if (w < thread / 32) place += rises_of_warps[w];
    all_rises += rises_of_warps[w];
  }
  if (all_rises == 0) return 0;
#pragma unroll
  for (int m = 0; m < most_matrices; ++m) {
    if (m >= choice.count || rises == 0) continue;
    const Redundancy& matrix = choice.matrices[m];
    for (int j = thread; j < choice.tokens; j += threads) {
      if (joining[m][j] <= matrix.red[j]) continue;
      choice.rises[place++] = {
          matrix.similarities + static_cast<std::size_t>(j) * static_cast<std::size_t>(choice.stride), matrix.red[j],
          joining[m][j]};
      matrix.red[j] = joining[m][j];
    }
  }
  __syncthreads();
  return all_rises;
}

/// A token that joins: which, in which step, and how many members' red it has raised.
struct Newcomer {
  int token;
  int step;
  const std::int32_t* joining[most_matrices];  // its rows of similarities
  std::int32_t red[most_matrices];
  int rises;
};

/// What the newcomer changes for some of a thread's tokens, from `first` on; the best candidate among them.
__device__ __forceinline__ Candidate update_tokens(const Choice& choice, const Newcomer& newcomer, int first,
                                                   Candidate best) {
  const auto threads = static_cast<int>(blockDim.x);
  const int tokens = choice.tokens;
  const int first_alone = choice.sinks > 0 ? 0 : tokens - choice.recent;
  std::int64_t sum[tokens_at_once], highest[tokens_at_once];
#pragma unroll
  for (int i = 0; i < tokens_at_once; ++i) {
    const int j = first + i * threads;
    sum[i] = highest[i] = 0;
    if (j < tokens) sum[i] = j != newcomer.token ? choice.excess[j] : choice.greatest ? -joined_excess : joined_excess;
  }
#pragma unroll
  for (int m = 0; m < most_matrices; ++m) {
    if (m >= choice.count) continue;
    const Redundancy& matrix = choice.matrices[m];
    // All loads before the first store, for the compiler cannot know that they differ.
    std::int32_t similarity[tokens_at_once], raised[tokens_at_once];
#pragma unroll
    for (int i = 0; i < tokens_at_once; ++i) {
      const int j = first + i * threads;
      similarity[i] = j < tokens ? newcomer.joining[m][j] : 0;
      raised[i] = j < tokens ? matrix.highest[j] : 0;
    }
#pragma unroll
    for (int i = 0; i < tokens_at_once; ++i) {
      const int j = first + i * threads;
      if (j >= tokens) continue;
      sum[i] += excess_of(similarity[i], newcomer.red[m], highest_similarity);
      if (j == newcomer.token && newcomer.step > 0) matrix.red[j] = newcomer.red[m];
      raised[i] = max(raised[i], similarity[i]);
      matrix.highest[j] = raised[i];
      highest[i] += raised[i];
    }
    if (newcomer.step == 1) {
      // The first, alone, had red 0, whatever it has now.
      const std::int32_t* alone =
          matrix.similarities + static_cast<std::size_t>(first_alone) * static_cast<std::size_t>(choice.stride);
#pragma unroll
      for (int i = 0; i < tokens_at_once; ++i) {
        const int j = first + i * threads;
        if (j >= tokens) continue;
        sum[i] += excess_of(alone[j], newcomer.red[m], highest_similarity) - excess_of(alone[j], 0, highest_similarity);
        if (j == first_alone) matrix.red[j] = newcomer.red[m];
      }
    }
  }
  for (int k = 0; k < newcomer.rises; ++k) {
    const Rise rise = choice.rises[k];
#pragma unroll
    for (int i = 0; i < tokens_at_once; ++i) {
      const int j = first + i * threads;
      if (j < tokens) sum[i] -= excess_of(rise.row[j], rise.low, rise.high);
    }
  }
#pragma unroll
  for (int i = 0; i < tokens_at_once; ++i) {
    const int j = first + i * threads;
    if (j >= tokens) continue;
    choice.excess[j] = sum[i];
    const std::int64_t redundancy = sum[i] + highest[i];
    best = better(best, {choice.greatest ? -redundancy : redundancy, j});
  }
  return best;
}

/// Steps [begin, end), a token joins in each; on one block of whole warps. Sums of integers do not depend on an order,
/// so the steps need no order among threads.
__global__ void __launch_bounds__(most_threads, 1) join_tokens(Choice choice, int begin, int end) {
  __shared__ int rises_of_warps[32];
  __shared__ Candidate best_of_warps[32];
  const auto threads = static_cast<int>(blockDim.x);
  const auto thread = static_cast<int>(threadIdx.x);
  int next = *choice.next;

  for (int step = begin; step < end; ++step) {
    Newcomer newcomer{};
    newcomer.step = step;
    newcomer.token = step < choice.sinks                   ? step
                     : step < choice.sinks + choice.recent ? choice.tokens - choice.recent + step - choice.sinks
                                                           : next;
#pragma unroll
    for (int m = 0; m < most_matrices; ++m) {
      if (m >= choice.count) continue;
      const Redundancy& matrix = choice.matrices[m];
      newcomer.joining[m] =
          matrix.similarities + static_cast<std::size_t>(newcomer.token) * static_cast<std::size_t>(choice.stride);
      newcomer.red[m] = step == 0 ? 0 : matrix.highest[newcomer.token];
    }
    newcomer.rises = raise_members(choice, newcomer.joining, rises_of_warps);

    Candidate best = nobody();
    for (int first = thread; first < choice.tokens; first += tokens_at_once * threads)
      best = update_tokens(choice, newcomer, first, best);
    best = best_of_warp(best);
    if (lane() == 0) best_of_warps[thread / 32] = best;
    if (thread == 0) choice.joined[step] = newcomer.token;
    __syncthreads();
    next = best_of_warp(lane() < threads / 32 ? best_of_warps[lane()] : nobody()).token;
  }
  if (thread == 0) *choice.next = next;
}

/// Numbers of a row of similarities: whole tiles.
int stride_of(int tokens) { return (tokens + tile_tokens - 1) / tile_tokens * tile_tokens; }

}  // namespace

bool CudaBackend::redundancy_fits(const LayerTensors& layer, int tokens, bool keys, bool values) const {
  // Which rows a step reads is known only when it comes: all must be there. Half of the memory is for layers that are
  // held, an eighth for vectors, a quarter for similarities; where that does not do, the host computes rows as it needs
  // them.
  const auto count = static_cast<std::size_t>(tokens);
  std::size_t vectors = 0;
  for (const auto& [wanted, tensor] : {std::pair{keys, layer.k}, {values, layer.v}})
    if (wanted) vectors += count * static_cast<std::size_t>(tensor.heads * padded_depth(tensor.dim)) * sizeof(double);
  const std::size_t similarities = count * static_cast<std::size_t>(stride_of(tokens)) * sizeof(std::int32_t);
  return vectors <= memory_.limit() / 8 && (keys && values ? 2 : 1) * similarities <= memory_.limit() / 4;
}

std::size_t CudaBackend::redundancy_bytes(const LayerTensors& layer, int tokens) const {
  if (!redundancy_fits(layer, tokens, true, true))
    return make_backend("cpu", threads_)->working_set(layer, {.redundancy_tokens = tokens});
  // Keys that are turned back, here and on their way to the device, and sines and cosines.
  const std::size_t keys = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(layer.k.heads * layer.k.dim);
  const std::size_t angles = static_cast<std::size_t>(layer.k.tokens) * layer.rope.inv_freq.size();
  return 2 * (keys + angles) * sizeof(double);
}

std::vector<std::int32_t> CudaBackend::least_redundant(const LayerTensors& layer, const RedundancyElimination& what) {
  const int tokens = static_cast<int>(what.resident.size());
  assert(what.keys || what.values);
  assert(what.sinks + what.recent >= 1 && what.sinks + what.recent <= what.keep && what.keep <= tokens);
  const auto count = static_cast<std::size_t>(tokens);
  const int stride = stride_of(tokens);
  const std::size_t matrix_size = count * static_cast<std::size_t>(stride);
  if (!redundancy_fits(layer, tokens, what.keys, what.values))
    return make_backend("cpu", threads_)->least_redundant(layer, what);

  DeviceCall call(*this);
  Choice choice{.matrices = {},
                .count = 0,
                .tokens = tokens,
                .stride = stride,
                .sinks = what.sinks,
                .recent = what.recent,
                .greatest = what.most_redundant,
                .excess = call.room<std::int64_t>(count),
                .rises = call.room<Rise>(most_matrices * count),
                .joined = call.room<std::int32_t>(static_cast<std::size_t>(what.keep)),
                .next = call.zeros<std::int32_t>(1)};
  const auto add_similarities = [&]<class Element>(const TokenVectors& vectors) {
    auto* made = call.room<std::int32_t>(matrix_size);
    auto* scales = call.room<double>(count);
    launch(find_scales<Element>, dim3(blocks_for(count * 32, scale_threads)), scale_threads, 0, call.stream(), vectors,
           scales, call.bad());
    const auto tiles = static_cast<unsigned>(stride / tile_tokens);
    launch(store_similarities<Element>, dim3(tiles, tiles), product_threads, 0, call.stream(), vectors, scales, stride,
           made);
    choice.matrices[choice.count++] = {made, call.room<std::int32_t>(count), call.room<std::int32_t>(count)};
  };
  const auto add_stored = [&](const TensorView& tensor) {
    // Of a tensor that is not held the residents come alone.
    const bool held = tensors_.holds(tensor);
    const DeviceTensors::Lease lease =
        tensors_.lease(tensor, 0, tensor.heads, held ? std::span<const std::int32_t>() : what.resident, call.stream());
    const TokenVectors vectors{.heads = call.copy(lease.heads()),
                               .head_count = tensor.heads,
                               .depth = padded_depth(tensor.dim),
                               .rows = held ? call.copy(what.resident) : nullptr,
                               .tokens = tokens};
    with_element(tensor.dtype, [&]<class Element>() { add_similarities.template operator()<Element>(vectors); });
    stream_.wait();  // before the tensor goes
  };
  const auto add_turned = [&] {
    const int depth = (layer.k.heads * layer.k.dim + chunk_depth - 1) / chunk_depth * chunk_depth;
    const std::vector<const void*> heads{call.copy(keys_at_slots(layer, what.resident, depth, threads_))};
    add_similarities.template operator()<double>(
        {.heads = call.copy(heads), .head_count = 1, .depth = depth, .rows = nullptr, .tokens = tokens});
  };
  if (what.keys && what.positions == Positions::cache) add_turned();
  if (what.keys && what.positions != Positions::cache) add_stored(layer.k);
  if (what.values) add_stored(layer.v);
  if (call.found_bad()) throw Error{Refusal::input, "similarity", "vectors", "finite numbers", "NaN or Inf"};

  launch(begin_choice, dim3(blocks_for(count, scale_threads)), scale_threads, 0, call.stream(), choice);
  const int threads = std::min(most_threads, (tokens + 32 * tokens_at_once - 1) / (32 * tokens_at_once) * 32);
  for (int begin = 0; begin < what.keep; begin += steps_a_launch)
    launch(join_tokens, dim3(1), threads, 0, call.stream(), choice, begin, std::min(begin + steps_a_launch, what.keep));
  std::vector<std::int32_t> kept(static_cast<std::size_t>(what.keep));
  call.fetch(static_cast<const std::int32_t*>(choice.joined), std::span(kept));
  std::ranges::sort(kept);
  return kept;
}

}  // namespace kvreplay
