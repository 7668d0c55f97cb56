// Products of 128 rows and of tiles of columns, as those of tiles.h, but of any depth: neither rows nor columns fit in
// shared memory whole, so that both pass by in chunks of 64 numbers.
//
// stream(somewhere, depth, row_at, column_at, first_tile, end_tile, consume): row_at(row) and column_at(tile, column)
// are where vectors of `depth` numbers begin, a multiple of 64, null for those that are missing (zeros);
// consume(tile, sums). All threads of the block call it with the same tiles.
//
// Sums of a chunk are added to those of the chunks before in float32, rounded to nearest. Of vectors of length 1, a and
// b, of which a_c and b_c are the parts in chunk c:
// - Tensor cores cut a sum off towards zero (Fasi, Higham, Mikaitis and Pranesh 2021, "Numerical behavior of NVIDIA
//   tensor cores", section 4): once in each of four steps of 16 numbers, by less than 2^-23 of it, and it is at most
//   |a_c| |b_c|. Over all chunks that is at most 4 * 2^-23 Σ |a_c| |b_c| <= 4.8e-7, by Cauchy and Schwarz.
// - Sums over chunks are off by at most 2^-25 each time that one is added, up or down: of `n` chunks some sqrt(n) *
// 3e-8
//   remain, 2.4e-7 of 4096 numbers.
// float32 vectors have no first part: sums of 64 products are rounded to nearest too.
#pragma once

#include <cstddef>

#include "cuda/tiles.h"

namespace kvreplay {

inline constexpr int chunk_depth = 64;

/// sums += more.
template <class Tiles>
__device__ __forceinline__ void add_sums(typename Tiles::Sums& sums, typename Tiles::Sums& more) {
#pragma unroll
  for (int i = 0; i < Tiles::row_count; ++i)
#pragma unroll
    for (int j = 0; j < Tiles::column_count; ++j) Tiles::at(sums, i, j) += Tiles::at(more, i, j);
}

template <class Tiles>
__device__ __forceinline__ void clear_sums(typename Tiles::Sums& sums) {
#pragma unroll
  for (int i = 0; i < Tiles::row_count; ++i)
#pragma unroll
    for (int j = 0; j < Tiles::column_count; ++j) Tiles::at(sums, i, j) = 0.0F;
}

/// `bytes` behind where something is, if it is anywhere.
__device__ __forceinline__ const void* behind(const void* where, std::size_t bytes) {
  return where == nullptr ? nullptr : static_cast<const unsigned char*>(where) + bytes;
}

/// Of the tiles of 16-bit numbers, WarpTiles or WarpGroupTiles of one chunk.
template <class Tiles>
struct DeepTiles : Tiles {
  using Tiles::threads, Tiles::rows, Tiles::columns;
  using typename Tiles::Sums;
  static_assert(Tiles::depth == chunk_depth);
  static constexpr int blocks_a_processor = 1;
  static constexpr int stages = threads > 128 ? 4 : 3;  // chunks in shared memory
  static constexpr std::size_t stage_bytes = Tiles::held_bytes + Tiles::tile_bytes;
  static constexpr std::size_t shared_bytes = stages * stage_bytes;

  template <class RowAt, class ColumnAt, class Consume>
  static __device__ __forceinline__ void stream(const void* somewhere, int depth, RowAt row_at, ColumnAt column_at,
                                                int first_tile, int end_tile, Consume consume) {
    const int chunks = depth / chunk_depth;
    int fetched_tile = first_tile;
    int fetched_chunk = 0;
    unsigned char* into = dynamic_shared<unsigned char>();
    const unsigned char* end = into + shared_bytes;
    const auto fetch = [&] {
      if (fetched_tile < end_tile) {
        const std::size_t begin = static_cast<std::size_t>(fetched_chunk) * Tiles::row_bytes;
        copy_rows<rows, chunk_depth, threads>(into, somewhere, [&](int row) { return behind(row_at(row), begin); });
        copy_rows<columns, chunk_depth, threads>(into + Tiles::held_bytes, somewhere, [&](int column) {
          return behind(column_at(fetched_tile, column), begin);
        });
        into += stage_bytes;
        if (into == end) into = dynamic_shared<unsigned char>();
        if (++fetched_chunk == chunks) {
          fetched_chunk = 0;
          ++fetched_tile;
        }
      }
      commit_copies();
    };
    for (int i = 0; i < stages - 1; ++i) fetch();

    // One warp group adds sums up while the other has the tensor cores.
    const bool late = threadIdx.x / 128 % 2 == 1;
    const unsigned char* from = dynamic_shared<unsigned char>();
    for (int tile = first_tile; tile < end_tile; ++tile) {
      Sums sums, of_chunk;
      clear_sums<Tiles>(sums);
      clear_sums<Tiles>(of_chunk);
      for (int chunk = 0; chunk < chunks; ++chunk) {
        wait_copies<stages - 2>();
        fence_async_proxy();
        __syncthreads();
        fetch();  // to where all have just read
        if (late) add_sums<Tiles>(sums, of_chunk);
        Tiles::multiply_tile(from, from + Tiles::held_bytes, of_chunk);
        if (!late) add_sums<Tiles>(sums, of_chunk);
        from += stage_bytes;
        if (from == end) from = dynamic_shared<unsigned char>();
      }
      if (late) add_sums<Tiles>(sums, of_chunk);
      consume(tile, sums);
    }
    wait_copies<0>();
    __syncthreads();
  }
};

template <>
struct DeepTiles<FloatTiles<chunk_depth>> : FloatTiles<chunk_depth> {
  using Tiles = FloatTiles<chunk_depth>;

  template <class RowAt, class ColumnAt, class Consume>
  static __device__ __forceinline__ void stream(const void* somewhere, int depth, RowAt row_at, ColumnAt column_at,
                                                int first_tile, int end_tile, Consume consume) {
    for (int tile = first_tile; tile < end_tile; ++tile) {
      Sums sums;
      clear_sums<Tiles>(sums);
      for (std::size_t begin = 0; begin < static_cast<std::size_t>(depth) * sizeof(float); begin += Tiles::row_bytes) {
        Tiles chunk;
        chunk.hold(somewhere, [&](int row) { return behind(row_at(row), begin); });
        chunk.stream(
            somewhere, [&](int, int column) { return behind(column_at(tile, column), begin); }, tile,
            [](int) { return -1; }, [&](int, Sums& of_chunk) { add_sums<Tiles>(sums, of_chunk); });
      }
      consume(tile, sums);
    }
  }
};

}  // namespace kvreplay
