// Cosines of token vectors, one triangle of products and its row maxima: no n x n anywhere.
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "attention/cpu_backend.h"

namespace kvreplay {
namespace {

// Bytes of packed columns: they serve all rows below them from the last-level cache.
constexpr std::size_t column_block_bytes = std::size_t{16} << 20;
// Panels of rows that one thread packs at a time.
constexpr int panels_at_once = 8;
// Dimensions summed in float32 before they join the others, to stay within 1e-6 of float64 in vectors of thousands.
constexpr int chunk_dims = 512;

}  // namespace

std::vector<double> CpuBackend::similarity_row_maxima(const TensorView& tensor, int tokens) {
  std::vector<double> maxima(static_cast<std::size_t>(tokens), 0.0);
  if (tokens < 2) return maxima;
  const int dim = tensor.heads * tensor.dim;
  const auto width = static_cast<std::size_t>(dim);
  const int rows = kernels_.rows;
  const int keys = kernels_.keys;
  const int tiles = (tokens + keys - 1) / keys;
  const std::size_t tile_floats = width * static_cast<std::size_t>(keys);
  const std::size_t panel_floats = width * static_cast<std::size_t>(rows);
  const int tiles_a_block =
      std::max(1, static_cast<int>(std::min(column_block_bytes / sizeof(float) / tile_floats, std::size_t(tiles))));
  float* columns = packed_keys_.at_least(static_cast<std::size_t>(tiles_a_block) * tile_floats);

  // Vectors [first, first + count) as unit vectors, packed with `count` beside each other.
  const auto pack_unit_vectors = [&](Scratch& mine, int first, int count, float* out) {
    float* vectors = mine.staging.at_least(static_cast<std::size_t>(count) * width);
    const int present = std::max(0, std::min(count, tokens - first));
    for (int i = 0; i < present; ++i) {
      float* vector = vectors + static_cast<std::size_t>(i) * width;
      for (int head = 0; head < tensor.heads; ++head) {
        kernels_.widen(tensor.row(head, first + i), tensor.dtype, tensor.dim, vector + head * tensor.dim);
      }
      double square = 0.0;
      for (int c = 0; c < dim; ++c) square += static_cast<double>(vector[c]) * static_cast<double>(vector[c]);
      const double inverse = square > 0.0 ? 1.0 / std::sqrt(square) : 0.0;
      for (int c = 0; c < dim; ++c) vector[c] = static_cast<float>(static_cast<double>(vector[c]) * inverse);
    }
    kernels_.pack(vectors, present, dim, count, out);
  };
  const auto tile_products = [&](const float* panel, const float* tile, float* part, float* out) {
    const std::size_t size = static_cast<std::size_t>(rows) * static_cast<std::size_t>(keys);
    kernels_.products(panel, tile, std::min(dim, chunk_dims), out);
    for (int begin = chunk_dims; begin < dim; begin += chunk_dims) {
      const auto done = static_cast<std::size_t>(begin);
      kernels_.products(panel + done * static_cast<std::size_t>(rows), tile + done * static_cast<std::size_t>(keys),
                        std::min(dim - begin, chunk_dims), part);
      for (std::size_t i = 0; i < size; ++i) out[i] += part[i];
    }
  };

  // A maximum does not depend on the order of its terms, so every thread may have its own.
  constexpr float below_any_cosine = -2.0F;
  std::vector<std::vector<float>> found(static_cast<std::size_t>(threads_),
                                        std::vector<float>(static_cast<std::size_t>(tokens), below_any_cosine));
  const int bands = (tokens + panels_at_once * rows - 1) / (panels_at_once * rows);
  const auto compare_band = [&](Scratch& mine, std::vector<float>& highest, int band, int first_tile, int end_tile) {
    float* panels = mine.keys.at_least(static_cast<std::size_t>(panels_at_once) * panel_floats);
    float* out = mine.values.at_least(2 * static_cast<std::size_t>(rows) * static_cast<std::size_t>(keys));
    float* part = out + static_cast<std::size_t>(rows) * static_cast<std::size_t>(keys);
    for (int panel = 0; panel < panels_at_once; ++panel) {
      pack_unit_vectors(mine, (band * panels_at_once + panel) * rows, rows,
                        panels + static_cast<std::size_t>(panel) * panel_floats);
    }
    for (int tile = first_tile; tile < end_tile; ++tile) {
      for (int panel = 0; panel < panels_at_once; ++panel) {
        const int first_row = (band * panels_at_once + panel) * rows;
        const int end_row = std::min(first_row + rows, tokens);
        if (tile * keys >= end_row) continue;
        tile_products(panels + static_cast<std::size_t>(panel) * panel_floats,
                      columns + static_cast<std::size_t>(tile - first_tile) * tile_floats, part, out);
        for (int row = first_row; row < end_row; ++row) {
          const float* cosines = out + static_cast<std::ptrdiff_t>(row - first_row) * keys;
          float row_highest = below_any_cosine;
          for (int key = tile * keys; key < std::min((tile + 1) * keys, row); ++key) {
            const float cosine = cosines[key - tile * keys];
            row_highest = std::max(row_highest, cosine);
            highest[static_cast<std::size_t>(key)] = std::max(highest[static_cast<std::size_t>(key)], cosine);
          }
          highest[static_cast<std::size_t>(row)] = std::max(highest[static_cast<std::size_t>(row)], row_highest);
        }
      }
    }
  };

#pragma omp parallel num_threads(threads_)
  for (int first_tile = 0; first_tile < tiles; first_tile += tiles_a_block) {
    const int end_tile = std::min(first_tile + tiles_a_block, tiles);
#pragma omp for schedule(static)
    for (int tile = first_tile; tile < end_tile; ++tile) {
      pack_unit_vectors(scratch(), tile * keys, keys,
                        columns + static_cast<std::size_t>(tile - first_tile) * tile_floats);
    }
#pragma omp for schedule(dynamic)
    for (int band = first_tile * keys / (panels_at_once * rows); band < bands; ++band) {
      Scratch& mine = scratch();
      compare_band(mine, found[static_cast<std::size_t>(&mine - scratch_.data())], band, first_tile, end_tile);
    }
  }
  for (std::size_t token = 0; token < maxima.size(); ++token) {
    float highest = below_any_cosine;
    for (const std::vector<float>& some : found) highest = std::max(highest, some[token]);
    maxima[token] = static_cast<double>(highest);
  }
  return maxima;
}

}  // namespace kvreplay
