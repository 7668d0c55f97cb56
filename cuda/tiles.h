// Products of 128 rows that stay and tiles of columns that pass by: sums[row, column] = <row, column>, float32.
//
// Three ways to make them, with one interface. A kernel holds its rows, then streams tiles; of each tile a thread has
// the sums of some rows and columns in registers: at(sums, i, j) is that of row(i) and column(j). A row lies with
// `slots` threads.
//
// hold(row_at): row_at(row) is where a row lies, null for one that is missing (zeros).
// stream(row_at, tile, next, consume): row_at(tile, column) likewise; next(tile) is the tile after it, -1 at the end;
// consume(tile, sums). All threads of the block call both; `tile` and what `next` says are the same for all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/ptx.h"
#include "cuda/stored_types.h"

namespace kvreplay {

/// 16-bit rows in shared memory: panels of 64 numbers, [depth / 64][rows][64], whose 16-byte pieces are exchanged for
/// those that are read together to lie in different banks. What matrix_descriptor describes.
template <int rows>
__device__ __forceinline__ unsigned piece_offset(unsigned row, unsigned piece) {
  return (piece / 8 * rows + row) * 128 + (piece % 8 ^ row % 8) * 16;
}

/// Each thread copies the same piece of every `rows_at_once`-th row: most of the addresses are then constant offsets.
template <int rows, int depth, int threads, class RowAt>
__device__ __forceinline__ void copy_rows(unsigned char* to, const void* somewhere, RowAt row_at) {
  constexpr unsigned pieces = depth / 8, rows_at_once = threads / pieces;
  static_assert(threads % pieces == 0 && rows % rows_at_once == 0);
  const unsigned piece = threadIdx.x % pieces;
#pragma unroll
  for (unsigned first = 0; first < rows; first += rows_at_once) {
    const unsigned row = first + threadIdx.x / pieces;
    const auto* from = static_cast<const unsigned char*>(row_at(static_cast<int>(row)));
    copy_async(to + piece_offset<rows>(row, piece), from != nullptr ? from + piece * 16 : somewhere, from != nullptr);
  }
}

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

/// Tensor cores through warps' products, compute capability 8.0 and later: a warp has 32 rows.
template <class Element, int depth>
struct WarpProducts {
  static constexpr int threads = 128;
  static constexpr int blocks_a_processor = depth == 256 ? 1 : 3;
  static constexpr int rows = 128;
  static constexpr int columns = 64;
  static constexpr int row_count = 4;
  static constexpr int column_count = 16;
  using Sums = float[2][8][4];

  static __device__ __forceinline__ int row(int i) {
    return static_cast<int>(threadIdx.x) / 32 * 32 + i / 2 * 16 + i % 2 * 8 + lane() / 4;
  }
  static __device__ __forceinline__ float& at(Sums& sums, int i, int j) {
    return sums[i / 2][j / 2][i % 2 * 2 + j % 2];
  }

  static __device__ __forceinline__ void multiply_tile(const unsigned char* held, const unsigned char* tile,
                                                       Sums& sums) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0F;
    const int first_row = static_cast<int>(threadIdx.x) / 32 * 32;
#pragma unroll
    for (int step = 0; step < depth / 16; ++step) {
      std::uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)  // matrices: rows 0-7 and 8-15 of 8 numbers, then of the next 8
        load_matrices(a[m], held + piece_offset<rows>(static_cast<unsigned>(first_row + m * 16 + lane() % 16),
                                                      static_cast<unsigned>(2 * step + lane() / 16)));
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        std::uint32_t b[4];  // matrices: 8 columns of 8 numbers and of the next 8, then the next 8 columns
        load_matrices(b, tile + piece_offset<columns>(static_cast<unsigned>(n * 8 + lane() / 16 * 8 + lane() % 8),
                                                      static_cast<unsigned>(2 * step + lane() / 8 % 2)));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply<Element>(sums[m][n], a[m], b[0], b[1]);
          multiply<Element>(sums[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
};

/// Tensor cores through Hopper's products of warp groups: a group of four warps has 64 rows. While one group consumes
/// its sums another has the tensor cores.
template <class Element, int depth>
struct WarpGroupProducts {
  static constexpr int threads = 256;
  static constexpr int blocks_a_processor = depth == 256 ? 1 : 2;
  static constexpr int rows = 128;
  static constexpr int columns = 128;
  static constexpr int row_count = 2;
  static constexpr int column_count = 32;
  using Sums = float[16][4];

  static __device__ __forceinline__ int row(int i) {
    return static_cast<int>(threadIdx.x) / 32 * 16 + i * 8 + lane() / 4;
  }
  static __device__ __forceinline__ float& at(Sums& sums, int i, int j) { return sums[j / 2][i * 2 + j % 2]; }

  static __device__ __forceinline__ void multiply_tile(const unsigned char* held, const unsigned char* tile,
                                                       Sums& sums) {
    const int first_row = static_cast<int>(threadIdx.x) / 128 * 64;
    warpgroup_begin();
#pragma unroll
    for (int step = 0; step < depth / 16; ++step) {
      const int panel = step / 4;
      const std::uint64_t within = static_cast<std::uint64_t>(step % 4 * 2);
      warpgroup_multiply<Element, columns>(sums, matrix_descriptor(held + (panel * rows + first_row) * 128) + within,
                                           matrix_descriptor(tile + panel * columns * 128) + within, step > 0);
    }
    warpgroup_commit();
    warpgroup_wait<0>();
    warpgroup_pin(sums);
  }
};

/// 16-bit rows in shared memory; a tile is fetched while the one before it is worked on, where there is room for two: a
/// block has 99 KiB on devices of 8.6, 8.9 and 12.
template <class Element_, int depth_, template <class, int> class Products>
struct SharedTiles : Products<Element_, depth_> {
  using Element = Element_;
  using typename Products<Element, depth_>::Sums;
  using Products<Element, depth_>::threads, Products<Element, depth_>::rows, Products<Element, depth_>::columns;
  static constexpr int depth = depth_;
  static constexpr int slots = 4;
  static constexpr std::size_t row_bytes = depth * sizeof(Element);
  static constexpr std::size_t held_bytes = rows * row_bytes;  // of shared memory, from its beginning
  static constexpr std::size_t tile_bytes = columns * row_bytes;
  static constexpr bool two_tiles = threads == 256 || depth < 256;
  static constexpr std::size_t shared_bytes = held_bytes + (two_tiles ? 2 : 1) * tile_bytes;

  static __device__ __forceinline__ int column(int j) { return j / 2 * 8 + lane() % 4 * 2 + j % 2; }
  static __device__ __forceinline__ int slot() { return lane() % 4; }

  template <class RowAt>
  __device__ __forceinline__ void hold(const void* somewhere, RowAt row_at) {
    copy_rows<rows, depth, threads>(dynamic_shared<unsigned char>(), somewhere, row_at);
    commit_copies();
  }

  template <class RowAt, class Next, class Consume>
  __device__ __forceinline__ void stream(const void* somewhere, RowAt row_at, int tile, Next next, Consume consume) {
    const unsigned char* held = dynamic_shared<unsigned char>();
    unsigned char* current = dynamic_shared<unsigned char>() + held_bytes;
    unsigned char* other = current + tile_bytes;
    const auto fetch = [&](int number, unsigned char* to) {
      if (number >= 0)
        copy_rows<columns, depth, threads>(to, somewhere, [&](int column) { return row_at(number, column); });
      commit_copies();
    };
    fetch(tile, current);
    while (tile >= 0) {
      const int following = next(tile);
      if constexpr (two_tiles) fetch(following, other);
      wait_copies<two_tiles ? 1 : 0>();
      fence_async_proxy();
      __syncthreads();
      Sums sums;
      SharedTiles::multiply_tile(held, current, sums);
      consume(tile, sums);
      __syncthreads();
      if constexpr (two_tiles) {
        unsigned char* used = current;
        current = other;
        other = used;
      } else {
        fetch(following, current);
      }
      tile = following;
    }
    wait_copies<0>();
    __syncthreads();
  }
};

template <class Element, int depth>
using WarpTiles = SharedTiles<Element, depth, WarpProducts>;
template <class Element, int depth>
using WarpGroupTiles = SharedTiles<Element, depth, WarpGroupProducts>;

/// float32 rows, products and sums rounded as float32 does.
template <int depth_>
struct FloatTiles {
  using Element = float;
  static constexpr int depth = depth_;
  static constexpr int threads = 128;
  static constexpr int blocks_a_processor = 2;
  static constexpr int rows = 128;
  static constexpr int columns = 64;
  static constexpr int row_count = 8;
  static constexpr int column_count = 8;
  static constexpr int slots = 8;
  static constexpr std::size_t row_bytes = depth * sizeof(float);
  static constexpr int chunk = 32;  // numbers of a row that are in shared memory at a time
  static constexpr int row_stride = rows + 4;
  static constexpr int column_stride = columns + 4;
  static constexpr std::size_t held_bytes = 0;  // rows are read again for each tile
  static constexpr std::size_t shared_bytes = chunk * (row_stride + column_stride) * sizeof(float);
  using Sums = float[8][8];

  static __device__ __forceinline__ int row(int i) {
    return i / 4 * 64 + static_cast<int>(threadIdx.x) / 8 * 4 + i % 4;
  }
  static __device__ __forceinline__ int column(int j) {
    return j / 4 * 32 + static_cast<int>(threadIdx.x) % 8 * 4 + j % 4;
  }
  static __device__ __forceinline__ int slot() { return static_cast<int>(threadIdx.x) % 8; }
  static __device__ __forceinline__ float& at(Sums& sums, int i, int j) { return sums[i][j]; }

  template <class RowAt>
  __device__ __forceinline__ void hold(const void*, RowAt row_at) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < held_count; ++i) held_[i] = static_cast<const float*>(row_at(i * 16 + thread / 8));
  }

  template <class RowAt, class Next, class Consume>
  __device__ __forceinline__ void stream(const void*, RowAt row_at, int tile, Next next, Consume consume) {
    float* held = dynamic_shared<float>();
    float* streamed = held + chunk * row_stride;
    const int thread = static_cast<int>(threadIdx.x);
    for (; tile >= 0; tile = next(tile)) {
      const float* passing[columns / 16];
#pragma unroll
      for (int i = 0; i < columns / 16; ++i) passing[i] = static_cast<const float*>(row_at(tile, i * 16 + thread / 8));
      Sums sums;
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] = 0.0F;
      for (int begin = 0; begin < depth; begin += chunk) {
        __syncthreads();
        put<held_count, row_stride>(held_, begin, held);
        put<columns / 16, column_stride>(passing, begin, streamed);
        __syncthreads();
#pragma unroll 4
        for (int c = 0; c < chunk; ++c) {
          float a[8], b[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) a[i] = held[c * row_stride + row(i)];
#pragma unroll
          for (int j = 0; j < 8; ++j) b[j] = streamed[c * column_stride + column(j)];
#pragma unroll
          for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[i][j] = __fmaf_rn(a[i], b[j], sums[i][j]);
        }
      }
      consume(tile, sums);
    }
    __syncthreads();
  }

 private:
  static constexpr int held_count = rows / 16;

  /// Turned: numbers [begin, begin + chunk) of 16 * count rows.
  template <int count, int stride>
  static __device__ __forceinline__ void put(const float* const (&from)[count], int begin, float* to) {
    const int thread = static_cast<int>(threadIdx.x);
    const int first = thread % 8 * 4;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      float4 numbers{0.0F, 0.0F, 0.0F, 0.0F};
      if (from[i] != nullptr) numbers = *reinterpret_cast<const float4*>(from[i] + begin + first);
      float* column = to + i * 16 + thread / 8;
      column[first * stride] = numbers.x;
      column[(first + 1) * stride] = numbers.y;
      column[(first + 2) * stride] = numbers.z;
      column[(first + 3) * stride] = numbers.w;
    }
  }

  const float* held_[held_count];
};

/// Calls `with` with the tiles for a type of numbers.
template <int depth, class With>
void with_tiles_of(DType dtype, bool warp_groups, With with) {
  with_element(dtype, [&]<class Element>() {
    if constexpr (std::is_same_v<Element, float>) {
      with.template operator()<FloatTiles<depth>>();
    } else if (warp_groups) {
      with.template operator()<WarpGroupTiles<Element, depth>>();
    } else {
      with.template operator()<WarpTiles<Element, depth>>();
    }
  });
}

}  // namespace kvreplay
