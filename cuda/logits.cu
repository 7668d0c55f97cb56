// Logits of some rows, written out: of few queries, for those who need them key by key.
#include <algorithm>

#include "cuda/attention_rows.h"
#include "cuda/launch.h"

namespace kvreplay {
namespace {

constexpr int split_keys = 1024;

template <class Tiles>
__global__ void __launch_bounds__(Tiles::threads, Tiles::blocks_a_processor)
    logit_rows(AttentionTask task, int first_row, int rows, int stride, float* logits, int* bad) {
  const int kv_head = static_cast<int>(blockIdx.z);
  const int list = task.lists == 1 ? 0 : kv_head;
  const int tile_row = static_cast<int>(blockIdx.x) * Tiles::rows;
  float* out[Tiles::row_count];
  int2 visible[Tiles::row_count];
#pragma unroll
  for (int i = 0; i < Tiles::row_count; ++i) {
    const int row = tile_row + Tiles::row(i);
    out[i] = row < rows ? logits + (static_cast<std::size_t>(kv_head) * static_cast<std::size_t>(rows) +
                                    static_cast<std::size_t>(row)) *
                                       static_cast<std::size_t>(stride)
                        : nullptr;
    visible[i] =
        row < rows ? task.visible[list * task.padded_queries + (first_row + row) / task.group] : make_int2(0, 0);
  }
  const int split_tiles = split_keys / Tiles::columns;
  const int first_tile = static_cast<int>(blockIdx.y) * split_tiles;
  bool finite = true;
  stream_keys<Tiles>(task, kv_head, first_row + tile_row, first_tile, first_tile + split_tiles,
                     [&](int key, typename Tiles::Sums& sums) {
                       const float scale = apply_cap<Tiles>(task, sums);
#pragma unroll
                       for (int i = 0; i < Tiles::row_count; ++i) {
                         if (out[i] == nullptr) continue;
#pragma unroll
                         for (int j = 0; j < Tiles::column_count; ++j) {
                           const int at = key + Tiles::column(j);
                           if (at >= stride) continue;
                           const bool sees = at >= visible[i].x && at < visible[i].y;
                           const float x = scale * Tiles::at(sums, i, j);
                           if (sees && !(fabsf(x) < INFINITY)) finite = false;
                           out[i][at] = sees ? x : -INFINITY;
                         }
                       }
                     });
  if (!finite) *bad = 1;
}

__global__ void fill_invisible(std::size_t count, float* logits) {
  const std::size_t at = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  if (at < count) logits[at] = -INFINITY;
}

}  // namespace

void write_logits(const ProductForm& form, const AttentionTask& task, int first_row, int rows, int stride,
                  float* logits, int* bad, cudaStream_t stream) {
  // Tiles that no row sees are not visited.
  constexpr int threads = 256;
  const std::size_t count =
      static_cast<std::size_t>(task.kv_heads) * static_cast<std::size_t>(rows) * static_cast<std::size_t>(stride);
  launch(fill_invisible, dim3(blocks_for(count, threads)), threads, 0, stream, count, logits);
  const dim3 blocks(blocks_for(static_cast<std::size_t>(rows), 128),
                    blocks_for(static_cast<std::size_t>(task.key_count), split_keys),
                    static_cast<unsigned>(task.kv_heads));
  with_tiles(form, [&]<class Tiles>() {
    launch(logit_rows<Tiles>, blocks, Tiles::threads, Tiles::shared_bytes, stream, task, first_row, rows, stride,
           logits, bad);
  });
}

}  // namespace kvreplay
