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

}  // namespace

std::vector<double> CpuBackend::similarity_row_maxima(const TensorView& tensor, int tokens) {
  std::vector<double> maxima(static_cast<std::size_t>(tokens), 0.0);
  if (tokens < 1) return maxima;
  const SimilarityKernels& kernels = similarity_kernels_;
  const int dim = tensor.heads * tensor.dim;
  // Products of bfloat16 numbers are exact in float32; vectors of other types are multiplied as float32.
  const bool pairs = level_.bfloat16 && tensor.dtype == DType::bfloat16;
  const auto add_products = pairs ? kernels.add_pair_products : kernels.add_products;
  const auto raise_maxima = pairs ? kernels.raise_pair_maxima : kernels.raise_maxima;
  const int words = pairs ? (dim + 1) / 2 : dim;
  const int rows = kernels.rows;
  const int columns = kernels.columns;
  const int tiles = (tokens + columns - 1) / columns;
  const std::size_t tile_floats = product(words, columns);
  const std::size_t panel_floats = product(words, rows);
  const int tiles_a_block =
      std::max(1, static_cast<int>(std::min(column_block_bytes / sizeof(float) / tile_floats, std::size_t(tiles))));
  float* packed_columns = packed_keys_.at_least(static_cast<std::size_t>(tiles_a_block) * tile_floats);

  // Vectors are multiplied by a power of two, exactly, that brings their lengths into [1/2, 1), and cosines by what
  // remains.
  const int padded = std::max(tiles * columns, (tokens + rows - 1) / rows * rows);
  std::vector<double> powers(static_cast<std::size_t>(tokens), 1.0);
  std::vector<double> lengths(static_cast<std::size_t>(tokens), 0.0);
  std::vector<float> scales(static_cast<std::size_t>(padded), 0.0F);
  const auto widen = [&](int token, float* vector) {
    for (int head = 0; head < tensor.heads; ++head)
      kernels_.widen(tensor.row(head, token), tensor.dtype, tensor.dim, vector + head * tensor.dim);
  };
  const auto pack = [&](Scratch& mine, int first, int count, float* out) {
    float* vectors = mine.staging.at_least(product(count, dim));
    const int present = std::clamp(tokens - first, 0, count);
    for (int i = 0; i < present; ++i) widen(first + i, vectors + product(i, dim));
    kernels.scale(vectors, present, dim, powers.data() + std::min(first, tokens));
    (pairs ? kernels.pack_pairs : kernels.pack)(vectors, present, dim, count, out);
  };

  // A maximum does not depend on the order of its terms, so every thread may have its own.
  std::vector<std::vector<float>> found(static_cast<std::size_t>(threads_));
  const int bands = (tokens + panels_at_once * rows - 1) / (panels_at_once * rows);
  const auto compare_band = [&](Scratch& mine, std::vector<float>& highest, int band, int first_tile, int end_tile) {
    const int first_row = band * panels_at_once * rows;
    const int panels = std::min(panels_at_once, (tokens - first_row + rows - 1) / rows);
    const int end_row = std::min(first_row + panels * rows, tokens);
    float* packed = mine.keys.at_least(product(panels_at_once, rows) * static_cast<std::size_t>(words));
    float* sums = mine.values.at_least(product(panels_at_once * rows, columns));
    float* row_maxima = mine.factors.at_least(product(panels_at_once * rows, kernels.lanes));
    std::fill_n(row_maxima, product(panels * rows, kernels.lanes), below_any_cosine);
    for (int panel = 0; panel < panels; ++panel)
      pack(mine, first_row + panel * rows, rows, packed + static_cast<std::size_t>(panel) * panel_floats);
    for (int tile = first_tile; tile < end_tile && tile * columns < end_row; ++tile) {
      const float* tile_columns = packed_columns + static_cast<std::size_t>(tile - first_tile) * tile_floats;
      for (int begin = 0; begin < words; begin += chunk_words) {
        for (int panel = 0; panel < panels; ++panel) {
          const int row = first_row + panel * rows;
          if (tile * columns >= std::min(row + rows, tokens)) continue;
          const CosineChunk chunk{
              .panel = packed + static_cast<std::size_t>(panel) * panel_floats + product(begin, rows),
              .tile = tile_columns + product(begin, columns),
              .words = std::min(chunk_words, words - begin),
              .first = begin == 0,
              .sums = sums + product(panel * rows, columns)};
          if (begin + chunk_words < words) {
            add_products(chunk);
            continue;
          }
          raise_maxima(chunk, {.seen = row - tile * columns,
                               .row_count = std::min(rows, tokens - row),
                               .row_scales = scales.data() + row,
                               .column_scales = scales.data() + tile * columns,
                               .row_maxima = row_maxima + product(panel * rows, kernels.lanes),
                               .column_maxima = highest.data() + tile * columns});
        }
      }
    }
    for (int row = first_row; row < end_row; ++row) {
      const float* of_row = row_maxima + product(row - first_row, kernels.lanes);
      float& to = highest[static_cast<std::size_t>(row)];
      to = std::max(to, *std::max_element(of_row, of_row + kernels.lanes));
    }
  };

  std::atomic<bool> finite{true};
#pragma omp parallel num_threads(threads_)
  {
    Scratch& mine = scratch();
    std::vector<float>& highest = found[static_cast<std::size_t>(&mine - scratch_.data())];
    highest.assign(static_cast<std::size_t>(padded), below_any_cosine);
    float* vector = mine.staging.at_least(product(columns, dim));
#pragma omp for schedule(static)
    for (int token = 0; token < tokens; ++token) {
      widen(token, vector);
      const auto i = static_cast<std::size_t>(token);
      const double length = kernels.norm(vector, dim, 2.0);
      if (!std::isfinite(length)) finite = false;
      if (!std::isfinite(length) || length == 0.0) continue;
      int exponent = 0;
      lengths[i] = 1.0 / std::frexp(length, &exponent);
      powers[i] = std::ldexp(1.0, -exponent);
      scales[i] = static_cast<float>(lengths[i]);
    }
    for (int first_tile = 0; first_tile < tiles; first_tile += tiles_a_block) {
      const int end_tile = std::min(first_tile + tiles_a_block, tiles);
#pragma omp for schedule(static)
      for (int tile = first_tile; tile < end_tile; ++tile)
        pack(mine, tile * columns, columns, packed_columns + static_cast<std::size_t>(tile - first_tile) * tile_floats);
      const int first_band = first_tile * columns / (panels_at_once * rows);
#pragma omp for schedule(dynamic)
      for (int number = first_band; number < bands; ++number)  // the longest first
        compare_band(mine, highest, bands - 1 - (number - first_band), first_tile, end_tile);
    }
  }
  if (!finite) throw Error{Refusal::input, "similarity", "vectors", "finite numbers", "others"};
  if (tokens < 2) return maxima;
  for (std::size_t token = 0; token < maxima.size(); ++token) {
    float highest = below_any_cosine;
    for (const std::vector<float>& some : found)
      if (!some.empty()) highest = std::max(highest, some[token]);
    maxima[token] = static_cast<double>(highest) * lengths[token];
  }
  return maxima;
}

}  // namespace kvreplay
