#include "attention/softmax_keys.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "error.h"

namespace kvreplay {
namespace {

/// The keys of `resident`, in ascending order, from position `lowest` to `position`.
void find_in_order(std::span<const std::int32_t> resident, int position, int lowest, QueryPlace& place) {
  const auto first = std::ranges::lower_bound(resident, lowest), end = std::ranges::upper_bound(resident, position);
  if (first >= end) return;
  place.first = static_cast<int>(first - resident.begin());
  place.end = static_cast<int>(end - resident.begin());
  if (*std::prev(end) == position) place.own = place.end - 1;
}

/// The same in any order. Throws Error{usage} where these keys do not stand side by side.
void find_in_any_order(std::span<const std::int32_t> resident, int position, int lowest, QueryPlace& place) {
  int seen = 0;
  for (int key = 0; key < static_cast<int>(resident.size()); ++key) {
    const int stands = resident[static_cast<std::size_t>(key)];
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
  const std::span<const std::int32_t> resident = softmax_keys.resident;
  const auto find = std::ranges::is_sorted(resident) ? find_in_order : find_in_any_order;
  std::vector<QueryPlace> places;
  places.reserve(queries.size());
  for (const std::int32_t position : queries) {
    QueryPlace place{.rotation = softmax_keys.rotation};
    place.stored = stored_query(layer, position);
    const int lowest = layer.first_visible(position);
    if (resident.empty()) {
      place.first = std::min(lowest, softmax_keys.count);
      place.end = std::min(position + 1, softmax_keys.count);
      if (position < softmax_keys.count) place.own = position;
    } else {
      find(resident.first(static_cast<std::size_t>(softmax_keys.count)), position, lowest, place);
    }
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

void rotate(const Rope& rope, const BackwardRotation* rotation, int distance, std::span<float> vector) {
  if (rotation != nullptr)
    rotation->apply(distance, vector);
  else
    rotate(rope, distance, vector);
}

double visible_pairs(const LayerTensors& layer, std::span<const std::int32_t> queries, int columns) {
  double pairs = 0;
  for (const std::int32_t position : queries)
    pairs += std::max(0, std::min(position + 1, columns) - layer.first_visible(position));
  return pairs * layer.q.heads;
}

}  // namespace kvreplay
