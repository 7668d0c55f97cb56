#include "observables/logits.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/softmax_keys.h"
#include "float_types.h"

namespace kvreplay {

double largest_logit(const LayerTensors& layer, std::int32_t position, int query_head) {
  const QueryPlace place = query_places(layer, {&position, 1}, {.count = position + 1}).front();
  const auto dim = static_cast<std::size_t>(layer.q.dim);
  std::vector<double> query(dim), key(dim);
  read_row(layer.q, query_head, place.stored, query);
  double largest = 0;
  for (int j = place.first; j < place.end; ++j) {
    read_row(layer.k, query_head / layer.group(), j, key);
    double product = 0;
    for (std::size_t c = 0; c < dim; ++c) product += query[c] * key[c];
    largest = std::max(largest, std::abs(product * static_cast<double>(layer.softmax_scale)));
  }
  const auto cap = static_cast<double>(layer.logit_softcap);
  return cap > 0 ? cap * std::tanh(largest / cap) : largest;
}

}  // namespace kvreplay
