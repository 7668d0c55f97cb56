// Attention that keys receive: 128 keys stay, the queries that see some of them pass by.
#include <algorithm>

#include "cuda/attention_rows.h"
#include "cuda/launch.h"

namespace kvreplay {
namespace {

// As for rows: what blocks there are depends on the task alone.
constexpr int wanted_blocks = 1024;
constexpr int segment_queries = 1024;  // no block takes fewer of a head
constexpr int key_rows = 128;

struct Segments {
  int key_tiles;
  int count;
  int queries;  // of each: a multiple of segment_queries
};

Segments segments_of(const AttentionTask& task, int columns) {
  const int key_tiles = (std::min(columns, task.key_count) + key_rows - 1) / key_rows;
  const int pieces = std::max(1, (task.padded_queries + segment_queries - 1) / segment_queries);
  const int wanted = std::clamp(wanted_blocks / std::max(1, key_tiles * task.layer_kv_heads), 1, pieces);
  const int pieces_a_segment = (pieces + wanted - 1) / wanted;
  return {key_tiles, (pieces + pieces_a_segment - 1) / pieces_a_segment, pieces_a_segment * segment_queries};
}

/// Adds the attention of a tile's queries to their keys, or with `counts` 1 where it is above 1. `sees(i, j)`: whether
/// a product counts. If it always does, no branch separates the exponentials, and their latencies overlap.
template <class Tiles, class Sees>
__device__ __forceinline__ void add_received(typename Tiles::Sums& sums, float scale, const RowState* states, Sees sees,
                                             FoldedSums<Tiles::row_count>& received, bool counts = false) {
  const RowState* mine = states + Tiles::column(0);
#pragma unroll
  for (int j = 0; j < Tiles::column_count; j += 2) {
    const float4 two = *reinterpret_cast<const float4*>(mine + (Tiles::column(j) - Tiles::column(0)));
    const RowState state[2] = {{two.x, two.y}, {two.z, two.w}};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 0; i < Tiles::row_count; ++i) {
        const float p = exp2_fast(__fmaf_rn(Tiles::at(sums, i, j + k), scale, -state[k].reference));
        if (!sees(i, j + k)) continue;
        if (counts)
          received.sum[i] += p * state[k].factor > 1.0F ? 1.0F : 0.0F;
        else
          received.sum[i] = __fmaf_rn(p, state[k].factor, received.sum[i]);
      }
    }
  }
}

template <class Tiles>
__global__ void __launch_bounds__(Tiles::threads, Tiles::blocks_a_processor)
    column_sums(AttentionTask task, const RowState* states, bool with_own, bool counts, int segment_query_count,
                double* partials) {
  const int kv_head = static_cast<int>(blockIdx.z);
  const int first_key = static_cast<int>(blockIdx.x) * Tiles::rows;
  const int end_key = first_key + Tiles::rows;
  const int list = task.lists == 1 ? 0 : kv_head;
  const void* keys = task.keys[kv_head];
  const int2* visible = task.visible + list * task.padded_queries;
  const int* own = task.own + list * task.padded_queries;

  Tiles tiles;
  tiles.hold(keys, [&](int i) -> const void* {
    const int key = first_key + i;
    return key < task.key_count ? row_at(keys, key, Tiles::row_bytes) : nullptr;
  });

  const int first_query = static_cast<int>(blockIdx.y) * segment_query_count;
  const int first_tile = first_query / Tiles::columns;
  const int end_tile = min(task.padded_queries, first_query + segment_query_count) / Tiles::columns;
  const auto is_reached = [&](int tile) {
    const QueryRange range = range_of(task, list, tile * Tiles::columns, Tiles::columns);
    return first_key < range.highest_end && end_key > range.lowest_first;
  };
  const auto reached_from = [&](int tile) {
    while (tile < end_tile && !is_reached(tile)) ++tile;
    return tile < end_tile ? tile : -1;
  };
  const int first_reached = reached_from(first_tile);
  int last_reached = end_tile - 1;
  while (last_reached > first_reached && !is_reached(last_reached)) --last_reached;

  for (int head = kv_head * task.group; head < (kv_head + 1) * task.group; ++head) {
    const void* queries = task.queries[head];
    const RowState* of_head = states + static_cast<std::size_t>(head) * static_cast<std::size_t>(task.padded_queries);
    FoldedSums<Tiles::row_count> received;

    tiles.stream(
        keys,
        [&](int tile, int column) -> const void* {
          const int query = tile * Tiles::columns + column;
          return query < task.query_count ? row_at(queries, task.rows[query], Tiles::row_bytes) : nullptr;
        },
        first_reached, [&](int tile) { return tile < last_reached ? reached_from(tile + 1) : -1; },
        [&](int tile, typename Tiles::Sums& sums) {
          const float scale = apply_cap<Tiles>(task, sums);
          const int query = tile * Tiles::columns;
          const QueryRange range = range_of(task, list, query, Tiles::columns);
          const bool all_seen = first_key >= range.highest_first && end_key <= range.lowest_end;
          const bool own_among = first_key <= range.highest_own && end_key > range.lowest_own;
          const bool whole = all_seen && (with_own || !own_among);
          if (whole && !counts) {
            add_received<Tiles>(sums, scale, of_head + query, [](int, int) { return true; }, received);
          } else {
            add_received<Tiles>(
                sums, scale, of_head + query,
                [&](int i, int j) {
                  const int key = first_key + Tiles::row(i);
                  const int at = query + Tiles::column(j);
                  return whole || (key >= visible[at].x && key < visible[at].y && (with_own || key != own[at]));
                },
                received, counts);
          }
          received.end_tile();
        });

    // The threads that share a key, one after the other. The held keys stay: what follows them is free.
    auto* shared = reinterpret_cast<double*>(dynamic_shared<unsigned char>() + Tiles::held_bytes);  // [rows, slots]
#pragma unroll
    for (int i = 0; i < Tiles::row_count; ++i) shared[Tiles::row(i) * Tiles::slots + Tiles::slot()] = received.total(i);
    __syncthreads();
    if (threadIdx.x < Tiles::rows) {
      double all = 0.0;
      for (int slot = 0; slot < Tiles::slots; ++slot)
        all += shared[static_cast<int>(threadIdx.x) * Tiles::slots + slot];
      const std::size_t heads = static_cast<std::size_t>(task.kv_heads * task.group);
      partials[(blockIdx.y * heads + static_cast<std::size_t>(head)) * gridDim.x * Tiles::rows +
               static_cast<std::size_t>(first_key) + threadIdx.x] = all;
    }
    __syncthreads();
  }
}

__global__ void add_segments(int segments, std::size_t heads, int padded_keys, int columns, const double* partials,
                             double* sums) {
  const int key = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (key >= columns) return;
  double all = 0.0;
  if (key < padded_keys) {
    for (int s = 0; s < segments; ++s)
      all += partials[(static_cast<std::size_t>(s) * heads + blockIdx.y) * static_cast<std::size_t>(padded_keys) +
                      static_cast<std::size_t>(key)];
  }
  sums[blockIdx.y * static_cast<std::size_t>(columns) + static_cast<std::size_t>(key)] = all;
}

}  // namespace

std::size_t column_partials(const AttentionTask& task, int columns) {
  const Segments segments = segments_of(task, columns);
  return static_cast<std::size_t>(segments.count) * static_cast<std::size_t>(task.kv_heads * task.group) *
         static_cast<std::size_t>(segments.key_tiles * key_rows);
}

void add_columns(const ProductForm& form, const AttentionTask& task, const RowState* states, bool with_own, bool counts,
                 int columns, double* partials, double* sums, cudaStream_t stream) {
  const Segments segments = segments_of(task, columns);
  const dim3 blocks(static_cast<unsigned>(segments.key_tiles), static_cast<unsigned>(segments.count),
                    static_cast<unsigned>(task.kv_heads));
  with_tiles(form, [&]<class Tiles>() {
    static_assert(Tiles::rows == key_rows);
    launch(column_sums<Tiles>, blocks, Tiles::threads, Tiles::shared_bytes, stream, task, states, with_own, counts,
           segments.queries, partials);
  });
  constexpr int threads = 256;
  const int heads = task.kv_heads * task.group;
  const dim3 keys(blocks_for(static_cast<std::size_t>(columns), threads), static_cast<unsigned>(heads));
  launch(add_segments, keys, threads, 0, stream, segments.count, static_cast<std::size_t>(heads),
         segments.key_tiles * key_rows, columns, partials, sums);
}

}  // namespace kvreplay
