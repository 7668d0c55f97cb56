// Cosines of token vectors: one triangle of products, each of which raises the maxima of its row and of its column.
// Memory grows with tokens alone: nothing is kept of a product.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>

#include "cuda/deep_tiles.h"
#include "cuda/device_call.h"
#include "cuda/launch.h"
#include "cuda/stored_types.h"
#include "cuda/token_vectors.h"
#include "cuda/widened.h"
#include "error.h"

namespace kvreplay {
namespace {

constexpr int block_threads = 256;
constexpr int tile_rows = 128;
// Tiles of rows whose column maxima are kept apart until a launch has ended, and columns that one block visits.
constexpr int band_tiles = 256;
constexpr int run_columns = 2048;

/// Vectors of some tokens made ready for products. cos(i, j) = product * scales[i] * scales[j].
struct Packed {
  const void* vectors;  // [tokens, depth]
  const float* scales;  // [tokens, up to whole tiles of rows]
  int first;            // the first token, a multiple of tile_rows
  int tokens;
};

__device__ __forceinline__ float stored_as(float x, float) { return x; }
__device__ __forceinline__ __half stored_as(float x, __half) { return __float2half_rn(x); }
__device__ __forceinline__ __nv_bfloat16 stored_as(float x, __nv_bfloat16) { return __float2bfloat16_rn(x); }

/// A warp a token. Vectors are multiplied by a power of two, exactly, that brings their lengths into [1/2, 1), lest
/// products leave float32. Those of float16 cannot, and would lose numbers that are small beside others.
template <class Element>
__global__ void pack_vectors(TokenVectors vectors, Element* packed, float* scales, double* inverses, int* bad) {
  const auto token = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  if (token >= vectors.tokens) return;  // all lanes of a warp
  double square = 0.0;
  for (int head = 0; head < vectors.head_count; ++head) {
    const Element* row = vectors.row<Element>(head, token);
    for (int c = lane(); c < vectors.depth; c += 32) {
      const double x = static_cast<double>(widened(row[c]));
      square += x * x;
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) square += __shfl_xor_sync(~0U, square, distance);
  const double length = sqrt(square);
  const bool finite = length < INFINITY;
  int exponent = 0;
  if (!std::is_same_v<Element, __half> && finite) frexp(length, &exponent);
  if (lane() == 0) {
    if (!finite) *bad = 1;
    inverses[token] = length > 0.0 ? 1.0 / ldexp(length, -exponent) : 0.0;
    scales[token] = static_cast<float>(inverses[token]);
  }
  const double power = ldexp(1.0, -exponent);
  Element* out = packed + static_cast<std::size_t>(token) * static_cast<std::size_t>(vectors.head_count) *
                              static_cast<std::size_t>(vectors.depth);
  for (int head = 0; head < vectors.head_count; ++head) {
    const Element* row = vectors.row<Element>(head, token);
    for (int c = lane(); c < vectors.depth; c += 32)
      out[head * vectors.depth + c] =
          stored_as(static_cast<float>(static_cast<double>(widened(row[c])) * power), Element());
  }
}

/// Tiles of rows [band, band + gridDim.y) against all columns j < i, a run of columns a block. Maxima of product * the
/// other's scale: row_parts[run, row in the band] and column_parts[tile in the band, column].
template <class Tiles>
__global__ void __launch_bounds__(Tiles::threads, Tiles::blocks_a_processor)
    raise_maxima(Packed rows, Packed columns, int depth, int band, float* row_parts, float* column_parts) {
  const int first_row = rows.first + (band + static_cast<int>(blockIdx.y)) * Tiles::rows;
  const int end_row = rows.first + rows.tokens;
  const int seen = min(columns.tokens, first_row + Tiles::rows - columns.first);
  constexpr int run_tiles = run_columns / Tiles::columns;
  const int first_tile = static_cast<int>(blockIdx.x) * run_tiles;
  const int end_tile = min(first_tile + run_tiles, (seen + Tiles::columns - 1) / Tiles::columns);
  if (first_tile >= end_tile) return;

  constexpr int warps = Tiles::threads / 32;
  __shared__ float of_warps[warps][Tiles::columns];
  float* column_part = column_parts + static_cast<std::size_t>(blockIdx.y) * static_cast<std::size_t>(columns.tokens);
  float highest[Tiles::row_count], scale[Tiles::row_count];
#pragma unroll
  for (int i = 0; i < Tiles::row_count; ++i) {
    highest[i] = -INFINITY;
    scale[i] = rows.scales[first_row - rows.first + Tiles::row(i)];
  }

  const std::size_t row_bytes = static_cast<std::size_t>(depth) * sizeof(typename Tiles::Element);
  Tiles::stream(
      rows.vectors, depth,
      [&](int row) {
        return first_row + row < end_row
                   ? behind(rows.vectors, static_cast<std::size_t>(first_row - rows.first + row) * row_bytes)
                   : nullptr;
      },
      [&](int tile, int column) {
        const int at = tile * Tiles::columns + column;
        return at < columns.tokens ? behind(columns.vectors, static_cast<std::size_t>(at) * row_bytes) : nullptr;
      },
      first_tile, end_tile,
      [&](int tile, typename Tiles::Sums& sums) {
        const int at = tile * Tiles::columns;
        const bool whole = columns.first + at + Tiles::columns <= first_row && first_row + Tiles::rows <= end_row;
#pragma unroll
        for (int j = 0; j < Tiles::column_count; ++j) {
          const int column = columns.first + at + Tiles::column(j);
          const float column_scale = columns.scales[at + Tiles::column(j)];
          float of_column = -INFINITY;
#pragma unroll
          for (int i = 0; i < Tiles::row_count; ++i) {
            const int row = first_row + Tiles::row(i);
            if (!whole && (row >= end_row || column >= row)) continue;
            const float product = Tiles::at(sums, i, j);
            highest[i] = fmaxf(highest[i], product * column_scale);
            of_column = fmaxf(of_column, product * scale[i]);
          }
      // Threads of a warp that have the same column.
#pragma unroll
          for (int distance = Tiles::slots; distance < 32; distance *= 2)
            of_column = fmaxf(of_column, __shfl_xor_sync(~0U, of_column, distance));
          if (lane() < Tiles::slots) of_warps[threadIdx.x / 32][Tiles::column(j)] = of_column;
        }
        __syncthreads();
        const int column = static_cast<int>(threadIdx.x);
        if (column < Tiles::columns && at + column < columns.tokens) {
          float of_column = of_warps[0][column];
#pragma unroll
          for (int warp = 1; warp < warps; ++warp) of_column = fmaxf(of_column, of_warps[warp][column]);
          column_part[at + column] = of_column;
        }
        __syncthreads();
      });

#pragma unroll
  for (int i = 0; i < Tiles::row_count; ++i) {
#pragma unroll
    for (int distance = 1; distance < Tiles::slots; distance *= 2)
      highest[i] = fmaxf(highest[i], __shfl_xor_sync(~0U, highest[i], distance));
    if (Tiles::slot() == 0)
      row_parts[(blockIdx.x * static_cast<std::size_t>(gridDim.y) + blockIdx.y) * Tiles::rows +
                static_cast<std::size_t>(Tiles::row(i))] = highest[i];
  }
}

/// maxima[token] = the highest of what a launch has found of it.
__global__ void join_maxima(Packed rows, Packed columns, int band, int tiles, const float* row_parts,
                            const float* column_parts, float* maxima) {
  const int token = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (token >= rows.first + rows.tokens) return;
  float highest = maxima[token];
  const int band_row = rows.first + band * tile_rows;
  const int column = token - columns.first;
  if (column >= 0 && column < columns.tokens)
    for (int tile = max(0, (token - band_row) / tile_rows); tile < tiles; ++tile)
      highest = fmaxf(highest, column_parts[static_cast<std::size_t>(tile) * static_cast<std::size_t>(columns.tokens) +
                                            static_cast<std::size_t>(column)]);
  const int row = token - band_row;
  if (row >= 0 && row < tiles * tile_rows) {
    const int seen = min(columns.tokens, band_row + (row / tile_rows + 1) * tile_rows - columns.first);
    for (int run = 0; run * run_columns < seen; ++run)
      highest = fmaxf(highest, row_parts[static_cast<std::size_t>(run) * static_cast<std::size_t>(tiles * tile_rows) +
                                         static_cast<std::size_t>(row)]);
  }
  maxima[token] = highest;
}

__global__ void begin_maxima(int tokens, float* maxima) {
  const int token = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (token < tokens) maxima[token] = -INFINITY;
}

/// Calls `with` with the tiles for a type of numbers.
template <class With>
void with_deep_tiles(DType dtype, bool warp_groups, With with) {
  with_tiles_of<chunk_depth>(dtype, warp_groups, [&]<class Tiles>() { with.template operator()<DeepTiles<Tiles>>(); });
}

}  // namespace

std::vector<double> CudaBackend::similarity_row_maxima(const TensorView& tensor, int tokens) {
  std::vector<double> maxima(static_cast<std::size_t>(std::max(0, tokens)), 0.0);
  if (tokens < 1) return maxima;
  DeviceCall call(*this);
  const int depth = tensor.heads * padded_depth(tensor.dim);
  const std::size_t vector_bytes = static_cast<std::size_t>(depth) * size_of(tensor.dtype);

  // All tokens at once, or as many as leave room for two such spans: their tensors, vectors and column maxima.
  const std::size_t token_bytes = 2 * vector_bytes + band_tiles * sizeof(float);
  const auto whole_tiles = [](std::size_t count) { return (count + tile_rows - 1) / tile_rows * tile_rows; };
  const auto span = static_cast<int>(
      std::min(whole_tiles(static_cast<std::size_t>(tokens)),
               std::max<std::size_t>(tile_rows, call.memory().limit() / 8 / token_bytes / tile_rows * tile_rows)));
  const auto padded_span = static_cast<std::size_t>(span);

  double* inverses = call.room<double>(static_cast<std::size_t>(tokens));
  float* highest = call.room<float>(static_cast<std::size_t>(tokens));
  const unsigned token_blocks = blocks_for(static_cast<std::size_t>(tokens), block_threads);
  launch(begin_maxima, dim3(token_blocks), block_threads, 0, call.stream(), tokens, highest);

  struct Room {
    std::byte* vectors;
    float* scales;
  };
  const auto make_room = [&] {
    return Room{call.room<std::byte>(padded_span * vector_bytes), call.zeros<float>(padded_span)};
  };
  const auto pack = [&](int first, const Room& room) {
    const Packed packed{room.vectors, room.scales, first, std::min(span, tokens - first)};
    std::vector<std::int32_t> rows(static_cast<std::size_t>(packed.tokens));
    std::iota(rows.begin(), rows.end(), first);
    const bool held = tensors_.holds(tensor);
    const bool whole = held || packed.tokens == tensor.tokens;
    const DeviceTensors::Lease lease = tensors_.lease(
        tensor, 0, tensor.heads, whole ? std::span<const std::int32_t>() : std::span(rows), call.stream());
    const TokenVectors vectors{.heads = call.copy(lease.heads()),
                               .head_count = tensor.heads,
                               .depth = padded_depth(tensor.dim),
                               .rows = held ? call.copy(rows) : nullptr,
                               .tokens = packed.tokens};
    with_element(tensor.dtype, [&]<class Element>() {
      launch(pack_vectors<Element>, dim3(blocks_for(static_cast<std::size_t>(packed.tokens) * 32, block_threads)),
             block_threads, 0, call.stream(), vectors, reinterpret_cast<Element*>(room.vectors), room.scales,
             inverses + first, call.bad());
    });
    stream_.wait();  // before the tensor goes
    return packed;
  };

  const Room of_rows = make_room();
  const Room of_columns = span < tokens ? make_room() : of_rows;
  const int runs = (span + run_columns - 1) / run_columns;
  const int most_tiles = std::min(band_tiles, span / tile_rows);
  float* row_parts =
      call.room<float>(static_cast<std::size_t>(runs) * static_cast<std::size_t>(most_tiles * tile_rows));
  float* column_parts = call.room<float>(static_cast<std::size_t>(most_tiles) * padded_span);
  const auto compare = [&](const Packed& rows, const Packed& columns) {
    const int row_tiles = (rows.tokens + tile_rows - 1) / tile_rows;
    for (int band = 0; band < row_tiles; band += band_tiles) {
      const int tiles = std::min(band_tiles, row_tiles - band);
      with_deep_tiles(tensor.dtype, call.warp_groups(), [&]<class Tiles>() {
        static_assert(Tiles::rows == tile_rows && run_columns % Tiles::columns == 0);
        launch(raise_maxima<Tiles>, dim3(static_cast<unsigned>(runs), static_cast<unsigned>(tiles)), Tiles::threads,
               Tiles::shared_bytes, call.stream(), rows, columns, depth, band, row_parts, column_parts);
      });
      launch(join_maxima, dim3(token_blocks), block_threads, 0, call.stream(), rows, columns, band, tiles, row_parts,
             column_parts, highest);
    }
  };
  for (int first_row = 0; first_row < tokens; first_row += span) {
    const Packed rows = pack(first_row, of_rows);
    compare(rows, rows);
    for (int first_column = 0; first_column < first_row; first_column += span)
      compare(rows, pack(first_column, of_columns));
  }

  if (call.found_bad()) throw Error{Refusal::input, "similarity", "vectors", "finite numbers", "NaN or Inf"};
  if (tokens < 2) return maxima;
  std::vector<float> found(maxima.size());
  call.fetch(static_cast<const float*>(highest), std::span(found));
  call.fetch(static_cast<const double*>(inverses), std::span(maxima));
  for (std::size_t token = 0; token < maxima.size(); ++token) maxima[token] *= static_cast<double>(found[token]);
  return maxima;
}

}  // namespace kvreplay
