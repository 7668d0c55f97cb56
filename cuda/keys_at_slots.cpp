#include "cuda/keys_at_slots.h"

#include <cstddef>

#include "attention/rope.h"
#include "float_types.h"

namespace kvreplay {

std::vector<double> keys_at_slots(const LayerTensors& layer, std::span<const std::int32_t> resident, int depth,
                                  int threads) {
  const TensorView& keys = layer.k;
  const int count = static_cast<int>(resident.size());
  const auto dim = static_cast<std::size_t>(keys.dim);
  const BackwardRotation to_slots(layer.rope, resident.back() - (count - 1));
  std::vector<double> turned(resident.size() * static_cast<std::size_t>(depth), 0.0);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int slot = 0; slot < count; ++slot) {
    const int position = resident[static_cast<std::size_t>(slot)];
    double* vector = turned.data() + static_cast<std::size_t>(slot) * static_cast<std::size_t>(depth);
    for (int head = 0; head < keys.heads; ++head) {
      const std::span part(vector + static_cast<std::size_t>(head) * dim, dim);
      for (std::size_t c = 0; c < dim; ++c)
        part[c] = static_cast<double>(load(keys.row(head, position), keys.dtype, c));
      to_slots.apply(slot - position, part);
    }
  }
  return turned;
}

}  // namespace kvreplay
