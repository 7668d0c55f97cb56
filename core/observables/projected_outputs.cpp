#include "observables/projected_outputs.h"

#include <algorithm>
#include <cstddef>

#include "cpu/aligned_buffer.h"
#include "cpu/tile.h"
#include "parallel.h"

namespace kvreplay {
namespace {

// Vectors that read each row of the projection once: it is widened again for the next ones.
constexpr int vectors_at_once = 256;

/// Adds ‖W_o x‖² of `count` vectors x, row by row of W_o. vector(i, out) writes the i-th.
template <class Vector>
void add_squares(const TileKernels& kernels, const TensorView& projection, int count, const Vector& vector,
                 double* squares) {
  const int width = projection.dim, panels = (count + kernels.rows - 1) / kernels.rows;
  AlignedBuffer<double> wide_vectors, wide_rows, packed_rows, products;
  double* const vectors = wide_vectors.at_least(product(panels * kernels.rows, width));
  double* const unpacked = wide_rows.at_least(product(kernels.wide_keys, width));
  double* const tile = packed_rows.at_least(product(kernels.wide_keys, width));
  double* const made = products.at_least(product(kernels.rows, kernels.wide_keys));
  for (int i = 0; i < count; ++i) vector(i, vectors + product(i, width));
  for (int begin = 0; begin < projection.tokens; begin += kernels.wide_keys) {
    const int rows = std::min(kernels.wide_keys, projection.tokens - begin);
    for (int r = 0; r < rows; ++r)
      kernels.widen_to_double(projection.row(0, begin + r), projection.dtype, width, unpacked + product(r, width));
    kernels.wide_pack(unpacked, rows, width, tile);
    for (int first = 0; first < count; first += kernels.rows) {
      const int some = std::min(kernels.rows, count - first);
      kernels.wide_products({vectors + product(first, width), width, 1}, tile, width, some, made);
      for (int i = 0; i < some; ++i)
        for (int r = 0; r < rows; ++r) {
          const double component = made[product(i, kernels.wide_keys) + static_cast<std::size_t>(r)];
          squares[first + i] += component * component;
        }
    }
  }
}

}  // namespace

std::vector<double> projected_squares(const TensorView& projection, std::span<const float> outputs, int heads,
                                      int queries, int threads) {
  const std::size_t dim = static_cast<std::size_t>(projection.dim / heads);
  const std::size_t vectors = outputs.size() / static_cast<std::size_t>(projection.dim);
  std::vector<double> squares(vectors);
  const TileKernels& kernels = tile_kernels();
  all_side_by_side(threads, (vectors + vectors_at_once - 1) / vectors_at_once, [&](std::size_t piece) {
    const std::size_t first = piece * vectors_at_once;
    const int count = static_cast<int>(std::min<std::size_t>(vectors_at_once, vectors - first));
    const auto vector = [&](int number, double* out) {
      const std::size_t i = first + static_cast<std::size_t>(number);
      const std::size_t set = i / static_cast<std::size_t>(queries), query = i % static_cast<std::size_t>(queries);
      for (int head = 0; head < heads; ++head) {
        const std::size_t at = (set * static_cast<std::size_t>(heads) + static_cast<std::size_t>(head)) *
                                   static_cast<std::size_t>(queries) +
                               query;
        std::copy_n(outputs.data() + at * dim, dim, out + static_cast<std::size_t>(head) * dim);
      }
    };
    add_squares(kernels, projection, count, vector, squares.data() + first);
  });
  return squares;
}

}  // namespace kvreplay
