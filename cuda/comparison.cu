// Two softmaxes, written out: logits of full and of stored keys, exponentials, sums over keys, products with values.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <numbers>

#include "attention/row_sums.h"
#include "cuda/comparison.h"
#include "cuda/launch.h"

namespace kvreplay {
namespace {

__device__ __forceinline__ double number_at(const StoredVectors& vectors, int head, int row, int c) {
  const void* matrix = vectors.heads[head];
  const std::size_t at =
      static_cast<std::size_t>(row) * static_cast<std::size_t>(vectors.depth) + static_cast<std::size_t>(c);
  if (vectors.dtype == DType::float32) return static_cast<double>(static_cast<const float*>(matrix)[at]);
  if (vectors.dtype == DType::float16) return static_cast<double>(__half2float(static_cast<const __half*>(matrix)[at]));
  return static_cast<double>(__bfloat162float(static_cast<const __nv_bfloat16*>(matrix)[at]));
}

/// Two numbers of a vector that RoPE turns together, turned by `moved` positions; after those pairs the rest, two by
/// two. Products do not care for the order.
__device__ __forceinline__ double2 turned_pair(const ComparisonTask& task, const StoredVectors& vectors, int head,
                                               int row, int pair, int moved) {
  const bool turns = pair < task.pairs;
  const int other = 2 * (pair - task.pairs);  // of those that do not turn
  const auto beside_pairs = [&](int number) { return number < task.offset ? number : number + 2 * task.pairs; };
  const int first = turns ? task.offset + (task.interleaved ? 2 * pair : pair) : beside_pairs(other);
  const int second = turns ? first + (task.interleaved ? 1 : task.pairs) : beside_pairs(other + 1);
  const double x = number_at(vectors, head, row, first);
  const double y = number_at(vectors, head, row, second);
  if (!turns || moved == 0) return make_double2(x, y);
  double sine, cosine;
  sincos(static_cast<double>(moved) * task.frequencies[pair], &sine, &cosine);
  return make_double2(x * cosine - y * sine, x * sine + y * cosine);
}

/// The row of resident keys that a row of a KV head reads.
__device__ __forceinline__ std::size_t resident_words(const ComparisonTask& task, int kv_head, int row) {
  const ResidentKeys& resident = task.resident;
  const int set = resident.sets == 1 ? 0 : row / task.group;
  const int set_row = (task.first_head + kv_head * task.group + row % task.group) / resident.heads_a_row;
  return static_cast<std::size_t>(set * resident.rows + set_row) * static_cast<std::size_t>(resident.words);
}

__device__ __forceinline__ bool is_resident(const ComparisonTask& task, std::size_t words, int key) {
  return (task.resident.bits[words + static_cast<std::size_t>(key / 64)] >> (key % 64) & 1) != 0;
}

/// From where it was captured to its slot, which is the number of resident keys before it.
__device__ __forceinline__ int moved(const ComparisonTask& task, std::size_t words, int key) {
  const std::size_t word = words + static_cast<std::size_t>(key / 64);
  const std::uint64_t before = task.resident.bits[word] & ((std::uint64_t{1} << (key % 64)) - 1);
  return task.resident.before[word] + __popcll(before) - key;
}

// Products: of a tile of rows by columns each thread has 4 x 4.

constexpr int tile_threads = 128;
constexpr int tile_rows = 32;
constexpr int tile_columns = 64;
constexpr int tile_depth = 16;

struct alignas(16) Tile {
  double rows[tile_depth][tile_rows + 2];
  double columns[tile_depth][tile_columns + 2];
};

__device__ __forceinline__ int tile_row(int i) { return static_cast<int>(threadIdx.x) / 16 * 4 + i; }
__device__ __forceinline__ int tile_column(int j) {
  return j / 2 * 32 + static_cast<int>(threadIdx.x) % 16 * 2 + j % 2;
}

/// sums += products over [begin, end) of the depth; fill(first) writes tile_depth numbers of each row and column.
template <class Fill>
__device__ __forceinline__ void multiply(const Tile& tile, int begin, int end, Fill fill, double (&sums)[4][4]) {
  for (int first = begin; first < end; first += tile_depth) {
    __syncthreads();
    fill(first);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < tile_depth; ++c) {
      double a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = tile.rows[c][tile_row(i)];
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j] = tile.columns[c][tile_column(j)];
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fma(a[i], b[j], sums[i][j]);
    }
  }
}

/// Rows of a KV head in bundles whose rows read the same keys at the same places.
struct Bundles {
  int count;
  int stride;  // from the first row of one to that of the next
  int size;
  int member_stride;  // from one row to the next

  __host__ __device__ int tiles() const { return (size + tile_rows - 1) / tile_rows; }
};

/// panel[kv_heads, rows, width]: logits, -infinity where a row does not see a key or, of stored keys, does not hold it.
__global__ void __launch_bounds__(tile_threads)
    logit_panel(ComparisonTask task, Bundles bundles, bool of_stored, double* panel) {
  __shared__ Tile tile;
  __shared__ int row_moves[tile_rows];
  __shared__ int key_moves[tile_columns];
  const StoredVectors& keys = of_stored ? task.stored_keys : task.keys;
  const bool moves = of_stored && task.moves;
  const int kv_head = static_cast<int>(blockIdx.z);
  const int first_key = task.first_key + static_cast<int>(blockIdx.x) * tile_columns;
  const int bundle = static_cast<int>(blockIdx.y) / bundles.tiles();
  const int first_member = static_cast<int>(blockIdx.y) % bundles.tiles() * tile_rows;
  const auto row_of = [&](int i) {
    const int member = first_member + i;
    return member < bundles.size ? bundle * bundles.stride + member * bundles.member_stride : -1;
  };
  const std::size_t bundle_words = resident_words(task, kv_head, row_of(0));

  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < tile_rows) {
    const int row = row_of(thread);
    row_moves[thread] = moves && row >= 0 ? moved(task, bundle_words, task.places[row / task.group].own) : 0;
  } else if (thread < tile_rows + tile_columns) {
    const int key = first_key + thread - tile_rows;
    key_moves[thread - tile_rows] = moves && key < task.end_key ? moved(task, bundle_words, key) : 0;
  }

  double sums[4][4] = {};
  multiply(
      tile, 0, keys.dim,
      [&](int first) {
        constexpr int pairs = tile_depth / 2;
        for (int at = thread; at < (tile_rows + tile_columns) * pairs; at += tile_threads) {
          const int pair = at % pairs;
          const int vector = at / pairs;
          const bool in_vector = first + 2 * pair < keys.dim;
          double2 numbers = make_double2(0.0, 0.0);
          if (vector < tile_rows) {
            const int row = row_of(vector);
            if (row >= 0 && in_vector)
              numbers = turned_pair(task, task.queries, kv_head * task.group + row % task.group,
                                    task.places[row / task.group].row, first / 2 + pair, row_moves[vector]);
            tile.rows[2 * pair][vector] = numbers.x;
            tile.rows[2 * pair + 1][vector] = numbers.y;
          } else {
            const int column = vector - tile_rows;
            if (first_key + column < task.end_key && in_vector)
              numbers = turned_pair(task, keys, kv_head, first_key + column, first / 2 + pair, key_moves[column]);
            tile.columns[2 * pair][column] = numbers.x;
            tile.columns[2 * pair + 1][column] = numbers.y;
          }
        }
      },
      sums);

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = row_of(tile_row(i));
    if (row < 0) continue;
    const ComparedQuery place = task.places[row / task.group];
    const std::size_t words = resident_words(task, kv_head, row);
    double* out = panel + (static_cast<std::size_t>(kv_head) * static_cast<std::size_t>(task.rows()) +
                           static_cast<std::size_t>(row)) *
                              static_cast<std::size_t>(task.width());
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int key = first_key + tile_column(j);
      if (key >= task.end_key) continue;
      const bool sees = key >= place.first && key < place.end;
      const bool holds = !of_stored || key == place.own || is_resident(task, words, key);
      double z = task.scale * sums[i][j];
      if (task.cap > 0.0) z = task.cap * tanh(z / task.cap);
      out[key - task.first_key] = sees && holds ? z : -HUGE_VAL;
    }
  }
}

// Sums over a row, by one block in a fixed order.

constexpr int row_threads = 256;

struct Sum {
  static __device__ __forceinline__ double of(double a, double b) { return a + b; }
};
struct Greatest {
  static __device__ __forceinline__ double of(double a, double b) { return fmax(a, b); }
};

constexpr int most_numbers = 11;

struct Combined {
  double of_threads[most_numbers][row_threads];
  double results[most_numbers];
};

/// Each of the numbers combined over all threads, which all get the result. `shared` serves one call after another.
template <class Combine, int count>
__device__ __forceinline__ void combine(Combined& shared, double (&numbers)[count]) {
  static_assert(count <= most_numbers);
  const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < count; ++i) shared.of_threads[i][thread] = numbers[i];
  __syncthreads();
  for (int i = thread / 32; i < count; i += row_threads / 32) {
    double all = shared.of_threads[i][thread % 32];
#pragma unroll
    for (int other = 32; other < row_threads; other += 32)
      all = Combine::of(all, shared.of_threads[i][other + thread % 32]);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) all = Combine::of(all, __shfl_xor_sync(~0U, all, lanes));
    if (thread % 32 == 0) shared.results[i] = all;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < count; ++i) numbers[i] = shared.results[i];
}

/// sums += {dot, full_square, stored_square}
__device__ __forceinline__ void add(double* sums, double full, double stored) {
  sums[0] += full * stored;
  sums[1] += full * full;
  sums[2] += stored * stored;
}

/// Logits -> weights in place, and all sums over keys.
__global__ void __launch_bounds__(row_threads)
    compare_rows(ComparisonTask task, double* full_panel, double* stored_panel, Comparison* results) {
  __shared__ Combined shared;
  const int kv_head = static_cast<int>(blockIdx.x) / task.rows();
  const int row = static_cast<int>(blockIdx.x) % task.rows();
  const int query = row / task.group;
  const ComparedQuery place = task.places[query];
  const std::size_t words = resident_words(task, kv_head, row);
  const int width = task.width();
  double* full = full_panel + blockIdx.x * static_cast<std::size_t>(width);
  double* stored = stored_panel + blockIdx.x * static_cast<std::size_t>(width);
  const auto thread = static_cast<int>(threadIdx.x);

  double logits[3] = {};
  double highest[2] = {-HUGE_VAL, -HUGE_VAL};
  for (int i = thread; i < width; i += row_threads) {
    const int key = task.first_key + i;
    const double z = full[i], stored_z = stored[i];
    if (key >= place.first && key < place.end && key < task.boundary)
      add(logits, z, stored_z == -HUGE_VAL ? 0.0 : stored_z);
    if (task.log_weights != nullptr)
      stored[i] += task.log_weights[blockIdx.x * static_cast<std::size_t>(width) + static_cast<std::size_t>(i)];
    highest[0] = fmax(highest[0], z);
    highest[1] = fmax(highest[1], stored[i]);
  }
  combine<Sum>(shared, logits);
  combine<Greatest>(shared, highest);

  double totals[2] = {};
  for (int i = thread; i < width; i += row_threads) {
    totals[0] += full[i] = exp(full[i] - highest[0]);
    totals[1] += stored[i] = exp(stored[i] - highest[1]);
  }
  combine<Sum>(shared, totals);
  const double of_keys = totals[0];
  const int head = kv_head * task.group + row % task.group;
  if (task.sink_logits != nullptr) {
#pragma unroll 1  // registers of one exponential
    for (int i = 0; i < 2; ++i) totals[i] += sink_weight(task.sink_logits[head], highest[i] * std::numbers::log2e);
  }

  double sums[11] = {};  // over all, the prompt, without sinks; l1; mass
  for (int i = thread; i < width; i += row_threads) {
    const int key = task.first_key + i;
    const double a = full[i] / totals[0];
    const double stored_a = stored[i] / totals[1];
    full[i] = a;
    stored[i] = stored_a;
    add(sums, a, stored_a);
    if (key < task.boundary) add(sums + 3, a, stored_a);
    if (key < task.boundary && key >= sink_tokens) add(sums + 6, a, stored_a);
    sums[9] += fabs(a - stored_a);
    if (key == place.own || is_resident(task, words, key)) sums[10] += a;
  }
  combine<Sum>(shared, sums);

  if (thread > 0) return;
  Comparison result;
  result.all = {sums[0], sums[1], sums[2]};
  result.prompt = {sums[3], sums[4], sums[5]};
  result.nosink = {sums[6], sums[7], sums[8]};
  result.logits = {logits[0], logits[1], logits[2]};
  result.l1 = sums[9];
  result.mass = sums[10];
  result.full_mass = of_keys / totals[0];
  results[static_cast<std::size_t>(head) * static_cast<std::size_t>(task.query_count) +
          static_cast<std::size_t>(query)] = result;
}

// Outputs.

constexpr int split_keys = 1024;  // that one block takes

int splits_of(const ComparisonTask& task) { return (task.width() + split_keys - 1) / split_keys; }
int tiles_of(int count, int each) { return (count + each - 1) / each; }

/// partials[2, splits, kv_heads, rows, dim]: weights times values, over some of the keys.
__global__ void __launch_bounds__(tile_threads)
    weighted_values(ComparisonTask task, const double* full_panel, const double* stored_panel, double* partials) {
  __shared__ Tile tile;
  const int kv_head = static_cast<int>(blockIdx.z) / 2;
  const bool of_stored = blockIdx.z % 2 != 0;
  const StoredVectors& values = of_stored ? task.stored_values : task.values;
  const int column_tiles = (values.dim + tile_columns - 1) / tile_columns;
  const int first_row = static_cast<int>(blockIdx.y) / column_tiles * tile_rows;
  const int first_column = static_cast<int>(blockIdx.y) % column_tiles * tile_columns;
  const int begin = static_cast<int>(blockIdx.x) * split_keys;
  const int end = min(task.width(), begin + split_keys);
  const std::size_t of_head = static_cast<std::size_t>(kv_head) * static_cast<std::size_t>(task.rows());
  const auto width = static_cast<std::size_t>(task.width());
  const double* weights = (of_stored ? stored_panel : full_panel) + of_head * width;

  const auto thread = static_cast<int>(threadIdx.x);
  double sums[4][4] = {};
  multiply(
      tile, begin, end,
      [&](int first) {
        for (int at = thread; at < tile_rows * tile_depth; at += tile_threads) {
          const int row = first_row + at / tile_depth;
          const int key = first + at % tile_depth;
          tile.rows[at % tile_depth][at / tile_depth] =
              row < task.rows() && key < end
                  ? weights[static_cast<std::size_t>(row) * width + static_cast<std::size_t>(key)]
                  : 0.0;
        }
        for (int at = thread; at < tile_columns * tile_depth; at += tile_threads) {
          const int column = first_column + at % tile_columns;
          const int key = first + at / tile_columns;
          tile.columns[at / tile_columns][at % tile_columns] =
              column < values.dim && key < end ? number_at(values, kv_head, task.first_key + key, column) : 0.0;
        }
      },
      sums);

  const std::size_t split = static_cast<std::size_t>(of_stored ? gridDim.x : 0) + blockIdx.x;
  const std::size_t all_rows = static_cast<std::size_t>(task.kv_heads) * static_cast<std::size_t>(task.rows());
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first_row + tile_row(i);
    if (row >= task.rows()) continue;
    double* out =
        partials + (split * all_rows + of_head + static_cast<std::size_t>(row)) * static_cast<std::size_t>(values.dim);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = first_column + tile_column(j);
      if (column < values.dim) out[column] = sums[i][j];
    }
  }
}

__global__ void __launch_bounds__(row_threads)
    compare_outputs(ComparisonTask task, int splits, const double* partials, Comparison* results, float* vectors) {
  __shared__ Combined shared;
  const int kv_head = static_cast<int>(blockIdx.x) / task.rows();
  const int row = static_cast<int>(blockIdx.x) % task.rows();
  const auto dim = static_cast<std::size_t>(task.values.dim);
  const std::size_t split_stride = gridDim.x * dim;
  const std::size_t cell =
      static_cast<std::size_t>(kv_head * task.group + row % task.group) * static_cast<std::size_t>(task.query_count) +
      static_cast<std::size_t>(row / task.group);
  double sums[4] = {};
  for (std::size_t c = threadIdx.x; c < dim; c += row_threads) {
    const double* of_full = partials + blockIdx.x * dim + c;
    const double* of_stored = of_full + static_cast<std::size_t>(splits) * split_stride;
    double o = 0.0, stored_o = 0.0;
    for (int split = 0; split < splits; ++split) {
      o += of_full[static_cast<std::size_t>(split) * split_stride];
      stored_o += of_stored[static_cast<std::size_t>(split) * split_stride];
    }
    add(sums, o, stored_o);
    sums[3] += (o - stored_o) * (o - stored_o);
    if (vectors == nullptr) continue;
    vectors[cell * dim + c] = static_cast<float>(o);
    vectors[split_stride + cell * dim + c] = static_cast<float>(stored_o - o);
  }
  combine<Sum>(shared, sums);
  if (threadIdx.x > 0) return;
  Comparison& result = results[cell];
  result.output_dot = sums[0];
  result.output_full_square = sums[1];
  result.output_square = sums[2];
  result.error_square = sums[3];
}

/// Rows whose stored keys stand at the same places.
Bundles bundles_of(const ComparisonTask& task) {
  const bool one_set = task.resident.sets == 1;
  const bool head_by_head = task.resident.heads_a_row < task.group;
  if (!task.moves || (one_set && !head_by_head)) return {1, 0, task.rows(), 1};
  if (one_set) return {task.group, 1, task.query_count, task.group};
  if (head_by_head) return {task.rows(), 1, 1, 1};
  return {task.query_count, task.group, task.group, 1};
}

}  // namespace

std::size_t comparison_panel(const ComparisonTask& task) {
  return static_cast<std::size_t>(task.kv_heads) * static_cast<std::size_t>(task.rows()) *
         static_cast<std::size_t>(task.width());
}

std::size_t comparison_outputs(const ComparisonTask& task) {
  return 2 * static_cast<std::size_t>(splits_of(task)) * static_cast<std::size_t>(task.kv_heads) *
         static_cast<std::size_t>(task.rows()) * static_cast<std::size_t>(task.values.dim);
}

void compare(const ComparisonTask& task, double* full, double* stored, double* outputs, Comparison* results,
             float* vectors, cudaStream_t stream) {
  const auto kv_heads = static_cast<unsigned>(task.kv_heads);
  const auto write_logits = [&](const Bundles& bundles, bool of_stored, double* panel) {
    const dim3 blocks(static_cast<unsigned>(tiles_of(task.width(), tile_columns)),
                      static_cast<unsigned>(bundles.count * bundles.tiles()), kv_heads);
    launch(logit_panel, blocks, tile_threads, 0, stream, task, bundles, of_stored, panel);
  };
  write_logits({1, 0, task.rows(), 1}, false, full);
  write_logits(bundles_of(task), true, stored);
  const dim3 rows(static_cast<unsigned>(task.kv_heads * task.rows()));
  launch(compare_rows, rows, row_threads, 0, stream, task, full, stored, results);
  const dim3 products(static_cast<unsigned>(splits_of(task)),
                      static_cast<unsigned>(tiles_of(task.rows(), tile_rows) * tiles_of(task.values.dim, tile_columns)),
                      2 * kv_heads);
  launch(weighted_values, products, tile_threads, 0, stream, task, full, stored, outputs);
  launch(compare_outputs, rows, row_threads, 0, stream, task, splits_of(task), outputs, results, vectors);
}

}  // namespace kvreplay
