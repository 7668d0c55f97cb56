#include "attention/softmax_keys.h"

#include <algorithm>
#include <string>

#include "error.h"

namespace kvreplay {
namespace {

/// What the query at `position` sees of the keys from position `lowest` on: keys [first, end), its own among them or
/// not.
void find_visible(const SoftmaxKeys& softmax_keys, int position, int lowest, QueryPlace& place) {
  if (softmax_keys.resident.empty()) {
    place.first = std::min(lowest, softmax_keys.count);
    place.end = std::min(position + 1, softmax_keys.count);
    if (position < softmax_keys.count) place.own = position;
    return;
  }
  int seen = 0;
  for (int key = 0; key < softmax_keys.count; ++key) {
    const int stands = softmax_keys.position(key);
    if (stands < lowest || stands > position) continue;
    if (seen == 0) place.first = key;
    place.end = key + 1;
    if (stands == position) place.own = key;
    ++seen;
  }
  if (place.end - place.first != seen) {
    throw Error{Refusal::usage, "resident", "order",
                "the keys visible to query " + std::to_string(position) + " in one contiguous range",
                "other keys among them"};
  }
}

}  // namespace

int stored_query(const LayerTensors& layer, std::int32_t position) {
  const std::span<const std::int32_t> stored = layer.query_positions;
  const auto found = std::lower_bound(stored.begin(), stored.end(), position);
  const bool is_stored =
      stored.empty() ? position >= 0 && position < layer.q.tokens : found != stored.end() && *found == position;
  if (!is_stored) {
    throw Error{Refusal::input, "q", "stored queries", "a query at position " + std::to_string(position), "none"};
  }
  return stored.empty() ? position : static_cast<int>(found - stored.begin());
}

std::vector<QueryPlace> query_places(const LayerTensors& layer, std::span<const std::int32_t> queries,
                                     const SoftmaxKeys& softmax_keys) {
  std::vector<QueryPlace> places;
  places.reserve(queries.size());
  for (const std::int32_t position : queries) {
    QueryPlace place;
    place.stored = stored_query(layer, position);
    find_visible(softmax_keys, position, layer.first_visible(position), place);
    if (softmax_keys.positions == Positions::cache) {
      if (place.own < 0) {
        throw Error{Refusal::usage, "resident", "cache positions", "the key of query " + std::to_string(position),
                    "an evicted key"};
      }
      place.moved = softmax_keys.moved(place.own);
    }
    places.push_back(place);
  }
  return places;
}

double visible_pairs(const LayerTensors& layer, std::span<const std::int32_t> queries, int columns) {
  double pairs = 0;
  for (const std::int32_t position : queries)
    pairs += std::max(0, std::min(position + 1, columns) - layer.first_visible(position));
  return pairs * layer.q.heads;
}

}  // namespace kvreplay
