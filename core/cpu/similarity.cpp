// Cosines of token vectors, one triangle of products and its row maxima: no n x n anywhere.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>

#include "cpu/cpu_backend.h"
#include "error.h"

namespace kvreplay {
namespace {

// Bytes of packed columns: they serve all rows below them from the last-level cache.
constexpr std::size_t column_block_bytes = std::size_t{16} << 20;
// Panels of rows that one thread packs at a time; they stay in the second-level cache.
constexpr int panels_at_once = 8;
// Words of a vector summed at a time: their part of a tile stays in the first-level cache while panels pass by, and
// sums of so few numbers of float32 stay within 1e-6 of float64 in vectors of thousands.
constexpr int chunk_words = 128;

/// Vectors by the kernels that fit their type, in tiles of columns and panels of rows.
struct CosineTiles {
  CosineTiles(const SimilarityKernels& of_level, const TensorView& of_tensor, int token_count, bool in_pairs)
      : kernels(of_level),
        tensor(of_tensor),
        tokens(token_count),
        pairs(in_pairs),
        dim(tensor.heads * tensor.dim),
        words(pairs ? (dim + 1) / 2 : dim),
        rows(kernels.rows),
        columns(kernels.columns),
        tiles((tokens + columns - 1) / columns),
        padded(std::max(tiles * columns, (tokens + rows - 1) / rows * rows)),
        powers(static_cast<std::size_t>(tokens), 1.0),
        lengths(static_cast<std::size_t>(tokens), 0.0),
        scales(static_cast<std::size_t>(padded), 0.0F) {}

  std::size_t tile_floats() const { return product(words, columns); }
  /// Whether the token's vector, [dim] numbers, is finite.
  bool set_length(int token, const float* vector) {
    const auto i = static_cast<std::size_t>(token);
    const double length = kernels.norm(vector, dim, 2.0);
    if (!std::isfinite(length)) return false;
    if (length == 0.0) return true;
    int exponent = 0;
    lengths[i] = 1.0 / std::frexp(length, &exponent);
    powers[i] = std::ldexp(1.0, -exponent);
    scales[i] = static_cast<float>(lengths[i]);
    return true;
  }
  /// Raises the maxima of rows [first_row, end_row), panels of packed rows, by the columns of one tile.
  void compare(const float* panels, const float* tile_columns, int tile, int first_row, int end_row, float* sums,
               float* row_maxima, float* column_maxima) const;

  const SimilarityKernels& kernels;
  const TensorView& tensor;
  int tokens;
  bool pairs;  // of bfloat16, whose products are exact in float32; vectors of other types are multiplied as float32
  int dim, words;
  int rows, columns;  // of a panel, of a tile
  int tiles;
  int padded;  // tokens, to whole tiles and panels
  // Vectors are multiplied by a power of two, exactly, that brings their lengths into [1/2, 1), and cosines by what
  // remains.
  std::vector<double> powers, lengths;
  std::vector<float> scales;
};

void CosineTiles::compare(const float* panels, const float* tile_columns, int tile, int first_row, int end_row,
                          float* sums, float* row_maxima, float* column_maxima) const {
  const auto add_products = pairs ? kernels.add_pair_products : kernels.add_products;
  const auto raise_maxima = pairs ? kernels.raise_pair_maxima : kernels.raise_maxima;
  for (int begin = 0; begin < words; begin += chunk_words) {
    for (int row = first_row; row < end_row; row += rows) {
      if (tile * columns >= std::min(row + rows, tokens)) continue;
      const int offset = row - first_row;
      const CosineChunk chunk{.panel = panels + product(offset, words) + product(begin, rows),
                              .tile = tile_columns + product(begin, columns),
                              .words = std::min(chunk_words, words - begin),
                              .first = begin == 0,
                              .sums = sums + product(offset, columns)};
      if (begin + chunk_words < words) {
        add_products(chunk);
        continue;
      }
      raise_maxima(chunk, {.seen = row - tile * columns,
                           .row_count = std::min(rows, tokens - row),
                           .row_scales = scales.data() + row,
                           .column_scales = scales.data() + tile * columns,
                           .row_maxima = row_maxima + product(offset, kernels.lanes),
                           .column_maxima = column_maxima + tile * columns});
    }
  }
}

}  // namespace

std::vector<double> CpuBackend::similarity_row_maxima(const TensorView& tensor, int tokens) {
  std::vector<double> maxima(static_cast<std::size_t>(tokens), 0.0);
  if (tokens < 1) return maxima;
  const SimilarityKernels& kernels = similarity_kernels_;
  CosineTiles all(kernels, tensor, tokens, level_.bfloat16 && tensor.dtype == DType::bfloat16);
  const int rows = all.rows, columns = all.columns;
  const std::size_t tile_floats = all.tile_floats();
  const int tiles_a_block = static_cast<int>(std::clamp(column_block_bytes / sizeof(float) / tile_floats,
                                                        std::size_t{1}, static_cast<std::size_t>(all.tiles)));
  float* packed_columns = packed_keys_.at_least(static_cast<std::size_t>(tiles_a_block) * tile_floats);

  const auto widen = [&](int token, float* vector) {
    for (int head = 0; head < tensor.heads; ++head)
      kernels_.widen(tensor.row(head, token), tensor.dtype, tensor.dim, vector + head * tensor.dim);
  };
  const auto pack = [&](ThreadScratch& mine, int first, int count, float* out) {
    float* vectors = mine.staging.at_least(product(count, all.dim));
    const int present = std::clamp(tokens - first, 0, count);
    for (int i = 0; i < present; ++i) widen(first + i, vectors + product(i, all.dim));
    kernels.scale(vectors, present, all.dim, all.powers.data() + std::min(first, tokens));
    (all.pairs ? kernels.pack_pairs : kernels.pack)(vectors, present, all.dim, count, out);
  };

  // A maximum does not depend on the order of its terms, so every thread may have its own.
  std::vector<std::vector<float>> found(static_cast<std::size_t>(threads_));
  const int band_rows = panels_at_once * rows;
  const int bands = (tokens + band_rows - 1) / band_rows;
  const auto compare_band = [&](ThreadScratch& mine, std::vector<float>& highest, int band, int first_tile,
                                int end_tile) {
    const int first_row = band * band_rows;
    const int end_row = std::min(first_row + band_rows, tokens);
    float* packed = mine.keys.at_least(product(band_rows, all.words));
    float* sums = mine.values.at_least(product(band_rows, columns));
    float* row_maxima = mine.factors.at_least(product(band_rows, kernels.lanes));
    std::fill_n(row_maxima, product(band_rows, kernels.lanes), below_any_cosine);
    for (int row = first_row; row < end_row; row += rows)
      pack(mine, row, rows, packed + product(row - first_row, all.words));
    for (int tile = first_tile; tile < end_tile && tile * columns < end_row; ++tile)
      all.compare(packed, packed_columns + static_cast<std::size_t>(tile - first_tile) * tile_floats, tile, first_row,
                  end_row, sums, row_maxima, highest.data());
    for (int row = first_row; row < end_row; ++row) {
      const float* of_row = row_maxima + product(row - first_row, kernels.lanes);
      float& to = highest[static_cast<std::size_t>(row)];
      to = std::max(to, *std::max_element(of_row, of_row + kernels.lanes));
    }
  };

  std::atomic<bool> finite{true};
#pragma omp parallel num_threads(threads_)
  {
    ThreadScratch& mine = scratch();
    std::vector<float>& highest = found[static_cast<std::size_t>(&mine - scratch_.data())];
    highest.assign(static_cast<std::size_t>(all.padded), below_any_cosine);
    float* vector = mine.staging.at_least(product(columns, all.dim));
#pragma omp for schedule(static)
    for (int token = 0; token < tokens; ++token) {
      widen(token, vector);
      if (!all.set_length(token, vector)) finite = false;
    }
    for (int first_tile = 0; first_tile < all.tiles; first_tile += tiles_a_block) {
      const int end_tile = std::min(first_tile + tiles_a_block, all.tiles);
#pragma omp for schedule(static)
      for (int tile = first_tile; tile < end_tile; ++tile)
        pack(mine, tile * columns, columns, packed_columns + static_cast<std::size_t>(tile - first_tile) * tile_floats);
      const int first_band = first_tile * columns / band_rows;
#pragma omp for schedule(dynamic)
      for (int number = first_band; number < bands; ++number)  // the longest first
        if (!interruption().ended())
          compare_band(mine, highest, bands - 1 - (number - first_band), first_tile, end_tile);
    }
  }
  interruption().require_all_done();
  if (!finite) throw Error{Refusal::input, "similarity", "vectors", "finite numbers", "NaN or Inf"};
  if (tokens < 2) return maxima;
  for (std::size_t token = 0; token < maxima.size(); ++token) {
    float highest = below_any_cosine;
    for (const std::vector<float>& some : found)
      if (!some.empty()) highest = std::max(highest, some[token]);
    maxima[token] = static_cast<double>(highest) * all.lengths[token];
  }
  return maxima;
}

}  // namespace kvreplay
