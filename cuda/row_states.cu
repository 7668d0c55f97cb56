// The softmax of each row: its reference and its sum, in one pass over the keys that it sees.
#include <algorithm>

#include "attention/row_sums.h"
#include "cuda/attention_rows.h"
#include "cuda/launch.h"

namespace kvreplay {
namespace {

// About so many blocks keep a device busy. What they are depends on the task alone, so that bits do too.
constexpr int wanted_blocks = 512;
constexpr int split_keys = 1024;  // no block takes fewer

struct Splits {
  int row_tiles;
  int count;
  int keys;  // of each: a multiple of split_keys
};

Splits splits_of(const AttentionTask& task) {
  const int row_tiles = (task.query_count * task.group + 127) / 128;
  const int pieces = std::max(1, (task.key_count + split_keys - 1) / split_keys);
  const int wanted = std::clamp(wanted_blocks / std::max(1, row_tiles * task.layer_kv_heads), 1, pieces);
  const int pieces_a_split = (pieces + wanted - 1) / wanted;
  return {row_tiles, (pieces + pieces_a_split - 1) / pieces_a_split, pieces_a_split * split_keys};
}

/// 2^n for an integer n <= 0.
__device__ __forceinline__ float power_of_two(float n) {
  return n < -126.0F ? 0.0F : __uint_as_float(static_cast<unsigned>(static_cast<int>(n) + 127) << 23);
}

/// The running softmax statistics of a thread's rows.
template <class Tiles>
struct RowStatistics {
  float reference[Tiles::row_count];
  float check[Tiles::row_count];  // NaN once a product was not finite
  FoldedSums<Tiles::row_count> sums;

  __device__ __forceinline__ RowStatistics() {
#pragma unroll
    for (int i = 0; i < Tiles::row_count; ++i) {
      reference[i] = -INFINITY;
      check[i] = 0.0F;
    }
  }

  /// `sees(i, j)`: whether a product counts.
  template <class Sees>
  __device__ __forceinline__ void add_tile(typename Tiles::Sums& products, float scale, Sees sees) {
#pragma unroll
    for (int i = 0; i < Tiles::row_count; ++i) {
      float highest = -INFINITY;
#pragma unroll
      for (int j = 0; j < Tiles::column_count; ++j) {
        float& x = Tiles::at(products, i, j);
        if (sees(i, j)) {
          check[i] = __fmaf_rn(x, 0.0F, check[i]);
          highest = fmaxf(highest, x);
        } else {
          x = -INFINITY;
        }
      }
      if (highest * scale > reference[i]) {
        const float raised = ceilf(highest * scale);
        const float factor = power_of_two(reference[i] - raised);
        sums.sum[i] *= factor;
        sums.folded[i] *= static_cast<double>(factor);
        reference[i] = raised;
      }
      const float base = reference[i] == -INFINITY ? 0.0F : reference[i];
#pragma unroll
      for (int j = 0; j < Tiles::column_count; ++j)
        sums.sum[i] += exp2_fast(__fmaf_rn(Tiles::at(products, i, j), scale, -base));
    }
    sums.end_tile();
  }
};

template <class Tiles>
__global__ void __launch_bounds__(Tiles::threads, Tiles::blocks_a_processor)
    row_statistics(AttentionTask task, int split_key_count, RowPartial* partials, int* bad) {
  const int kv_head = static_cast<int>(blockIdx.z);
  const int first_row = static_cast<int>(blockIdx.x) * Tiles::rows;
  const int list = task.lists == 1 ? 0 : kv_head;
  const int rows = task.query_count * task.group;

  RowStatistics<Tiles> statistics;
  int2 visible[Tiles::row_count];
  int highest_first = 0;
  int lowest_end = task.key_count;
#pragma unroll
  for (int i = 0; i < Tiles::row_count; ++i) {
    const int row = first_row + Tiles::row(i);
    visible[i] = row < rows ? task.visible[list * task.padded_queries + row / task.group] : make_int2(0, 0);
    highest_first = max(highest_first, visible[i].x);
    lowest_end = min(lowest_end, visible[i].y);
  }

  const int split_tiles = split_key_count / Tiles::columns;
  const int first_tile = static_cast<int>(blockIdx.y) * split_tiles;
  stream_keys<Tiles>(task, kv_head, first_row, first_tile, first_tile + split_tiles,
                     [&](int key, typename Tiles::Sums& sums) {
                       const float scale = apply_cap<Tiles>(task, sums);
                       // Two instantiations: products remain in their registers, and no branch separates the
                       // exponentials.
                       if (key >= highest_first && key + Tiles::columns <= lowest_end)
                         statistics.add_tile(sums, scale, [](int, int) { return true; });
                       else
                         statistics.add_tile(sums, scale, [&](int i, int j) {
                           const int at = key + Tiles::column(j);
                           return at >= visible[i].x && at < visible[i].y;
                         });
                     });

  // The threads that share a row, one after the other.
  auto* shared = dynamic_shared<RowPartial>();  // [rows, slots]
#pragma unroll
  for (int i = 0; i < Tiles::row_count; ++i) {
    shared[Tiles::row(i) * Tiles::slots + Tiles::slot()] = {statistics.sums.total(i), statistics.reference[i]};
    if (!(statistics.check[i] == 0.0F)) *bad = 1;
  }
  __syncthreads();
  const int row = first_row + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= Tiles::rows || row >= rows) return;
  const RowPartial* mine = shared + threadIdx.x * Tiles::slots;
  RowPartial all{0.0, -INFINITY};
  for (int slot = 0; slot < Tiles::slots; ++slot) all.reference = fmaxf(all.reference, mine[slot].reference);
  for (int slot = 0; slot < Tiles::slots; ++slot)
    if (mine[slot].sum > 0.0)
      all.sum += mine[slot].sum * static_cast<double>(power_of_two(mine[slot].reference - all.reference));
  const int head = kv_head * task.group + row % task.group;
  const std::size_t of_split = static_cast<std::size_t>(blockIdx.y) * static_cast<std::size_t>(gridDim.z);
  partials[(of_split * static_cast<std::size_t>(task.group) + static_cast<std::size_t>(head)) *
               static_cast<std::size_t>(task.padded_queries) +
           static_cast<std::size_t>(row / task.group)] = all;
}

__global__ void combine_statistics(AttentionTask task, int splits, const double* weights, double above_uniform,
                                   const RowPartial* partials, RowState* states) {
  const int query = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (query >= task.padded_queries) return;
  const std::size_t heads = static_cast<std::size_t>(task.kv_heads * task.group);
  const std::size_t at = blockIdx.y * static_cast<std::size_t>(task.padded_queries) + static_cast<std::size_t>(query);
  RowState state;
  if (query < task.query_count) {
    const std::size_t stride = heads * static_cast<std::size_t>(task.padded_queries);
    float reference = -INFINITY;
    for (int s = 0; s < splits; ++s)
      reference = fmaxf(reference, partials[static_cast<std::size_t>(s) * stride + at].reference);
    double sum = 0.0;
    for (int s = 0; s < splits; ++s) {
      const RowPartial& partial = partials[static_cast<std::size_t>(s) * stride + at];
      if (partial.sum > 0.0) sum += partial.sum * static_cast<double>(power_of_two(partial.reference - reference));
    }
    if (sum > 0.0) {
      if (task.sink_logits != nullptr) sum += sink_weight(task.sink_logits[blockIdx.y], static_cast<double>(reference));
      state.reference = reference;
      double weight = weights != nullptr ? weights[query] : 1.0;
      if (above_uniform > 0.0) {
        const int list = task.lists == 1 ? 0 : static_cast<int>(blockIdx.y) / task.group;
        const int2 sees = task.visible[list * task.padded_queries + query];
        weight = static_cast<double>(sees.y - sees.x) / above_uniform;
      }
      state.factor = static_cast<float>(weight / sum);
    }
  }
  states[at] = state;
}

}  // namespace

std::size_t row_partials(const AttentionTask& task) {
  return static_cast<std::size_t>(splits_of(task).count) * static_cast<std::size_t>(task.kv_heads * task.group) *
         static_cast<std::size_t>(task.padded_queries);
}

void find_row_states(const ProductForm& form, const AttentionTask& task, const double* weights, double above_uniform,
                     RowPartial* partials, RowState* states, int* bad, cudaStream_t stream) {
  const Splits splits = splits_of(task);
  const dim3 blocks(static_cast<unsigned>(splits.row_tiles), static_cast<unsigned>(splits.count),
                    static_cast<unsigned>(task.kv_heads));
  with_tiles(form, [&]<class Tiles>() {
    launch(row_statistics<Tiles>, blocks, Tiles::threads, Tiles::shared_bytes, stream, task, splits.keys, partials,
           bad);
  });
  constexpr int threads = 256;
  const dim3 queries(blocks_for(static_cast<std::size_t>(task.padded_queries), threads),
                     static_cast<unsigned>(task.kv_heads * task.group));
  launch(combine_statistics, queries, threads, 0, stream, task, splits.count, weights, above_uniform, partials, states);
}

}  // namespace kvreplay
