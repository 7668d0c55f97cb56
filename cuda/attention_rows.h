// What kernels that make products of a task's rows and keys share.
#pragma once

#include "cuda/attention_task.h"
#include "cuda/tiles.h"

namespace kvreplay {

__device__ __forceinline__ const void* row_at(const void* matrix, int row, std::size_t row_bytes) {
  return static_cast<const unsigned char*>(matrix) + static_cast<std::size_t>(row) * row_bytes;
}

/// What `count` queries from `first` on see together, a multiple of range_queries both.
__device__ __forceinline__ QueryRange range_of(const AttentionTask& task, int list, int first, int count) {
  const QueryRange* ranges = task.ranges + list * (task.padded_queries / range_queries);
  QueryRange all = ranges[first / range_queries];
  for (int i = 1; i < count / range_queries; ++i) {
    const QueryRange more = ranges[first / range_queries + i];
    all.lowest_first = min(all.lowest_first, more.lowest_first);
    all.highest_first = max(all.highest_first, more.highest_first);
    all.lowest_end = min(all.lowest_end, more.lowest_end);
    all.highest_end = max(all.highest_end, more.highest_end);
    all.lowest_own = min(all.lowest_own, more.lowest_own);
    all.highest_own = max(all.highest_own, more.highest_own);
  }
  return all;
}

/// Products -> capped logits where there is a cap; what products or logits are multiplied with.
template <class Tiles>
__device__ __forceinline__ float apply_cap(const AttentionTask& task, typename Tiles::Sums& sums) {
  if (!(task.cap > 0.0F)) return task.scale;
#pragma unroll
  for (int i = 0; i < Tiles::row_count; ++i)
#pragma unroll
    for (int j = 0; j < Tiles::column_count; ++j) {
      float& x = Tiles::at(sums, i, j);
      x = task.cap * tanhf(task.scale * x);
    }
  return 1.0F;
}

/// Sums of float32 terms that go into float64 after some tiles, before they lose digits.
template <int count>
struct FoldedSums {
  float sum[count];
  double folded[count];
  int tiles = 0;

  __device__ __forceinline__ FoldedSums() {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      sum[i] = 0.0F;
      folded[i] = 0.0;
    }
  }
  /// After each tile.
  __device__ __forceinline__ void end_tile() {
    constexpr int tiles_between_folds = 4;
    if (++tiles < tiles_between_folds) return;
    tiles = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      folded[i] += static_cast<double>(sum[i]);
      sum[i] = 0.0F;
    }
  }
  __device__ __forceinline__ double total(int i) const { return folded[i] + static_cast<double>(sum[i]); }
};

/// The 128 rows of a KV head from `first_row` on against its keys, tiles [first_tile, end_tile) as far as some row sees
/// them: consume(first key of the tile, sums). Held rows are those of the tile's own numbers.
template <class Tiles, class Consume>
__device__ __forceinline__ void stream_keys(const AttentionTask& task, int kv_head, int first_row, int first_tile,
                                            int end_tile, Consume consume) {
  const int rows = task.query_count * task.group;
  const int list = task.lists == 1 ? 0 : kv_head;
  const int first_query = first_row / task.group / range_queries * range_queries;
  const int end_query =
      min(task.padded_queries, ((first_row + Tiles::rows - 1) / task.group / range_queries + 1) * range_queries);
  const QueryRange range = range_of(task, list, first_query, end_query - first_query);
  first_tile = max(first_tile, range.lowest_first / Tiles::columns);
  end_tile = min(end_tile, (range.highest_end + Tiles::columns - 1) / Tiles::columns);

  const void* const* queries = task.queries + kv_head * task.group;
  const void* keys = task.keys[kv_head];
  Tiles tiles;
  tiles.hold(keys, [&](int i) -> const void* {
    const int row = first_row + i;
    if (row >= rows) return nullptr;
    return row_at(queries[row % task.group], task.rows[row / task.group], Tiles::row_bytes);
  });
  tiles.stream(
      keys,
      [&](int tile, int column) -> const void* {
        const int key = tile * Tiles::columns + column;
        return key < task.key_count ? row_at(keys, key, Tiles::row_bytes) : nullptr;
      },
      first_tile < end_tile ? first_tile : -1, [&](int tile) { return tile + 1 < end_tile ? tile + 1 : -1; },
      [&](int tile, typename Tiles::Sums& sums) { consume(tile * Tiles::columns, sums); });
}

/// Calls `with` with the tiles of a form.
template <class With>
void with_tiles(const ProductForm& form, With with) {
  if (form.depth == 64) return with_tiles_of<64>(form.dtype, form.warp_groups, with);
  if (form.depth == 128) return with_tiles_of<128>(form.dtype, form.warp_groups, with);
  with_tiles_of<256>(form.dtype, form.warp_groups, with);
}

}  // namespace kvreplay
