#include "policies/scores/key_products.h"

#include "float_types.h"

namespace kvreplay {

Matrix key_products(const LayerView& view, const Matrix& directions) {
  const TensorView& keys = view.tensors().k;
  Matrix products(keys.heads, view.tokens());
  view.on_threads(static_cast<std::size_t>(keys.heads), [&](std::size_t number) {
    const auto head = static_cast<int>(number);
    const ResidentPositions positions = view.positions(head);
    for (int i = 0; i < products.columns(); ++i) {
      const std::byte* key = keys.row(head, positions[i].number);
      for (int c = 0; c < keys.dim; ++c)
        products(head, i) +=
            directions(head, c) * static_cast<double>(load(key, keys.dtype, static_cast<std::size_t>(c)));
    }
  });
  return products;
}

}  // namespace kvreplay
