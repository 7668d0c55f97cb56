// Who takes part in a softmax, and what each query sees of them: the same for all backends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/backend.h"
#include "attention/rope.h"
#include "tensor.h"

namespace kvreplay {

/// The keys that take part in a softmax: all of [0, count), or a resident list in which the keys that a query sees
/// stand side by side.
struct SoftmaxKeys {
  int count = 0;
  std::span<const std::int32_t> resident = {};  // [count], or empty
  Positions positions = Positions::original;
  const BackwardRotation* rotation = nullptr;  // for all moves, if none is forward; null: angles are computed for each

  int position(int key) const { return resident.empty() ? key : resident[static_cast<std::size_t>(key)]; }
  /// By how much a key moves from where it was captured.
  int moved(int key) const { return positions == Positions::cache ? key - position(key) : 0; }
};

/// The number among the stored queries of the one at `position`. Throws Error{input} where it is not stored.
int stored_query(const LayerTensors& layer, std::int32_t position);

/// A query and what it sees of the keys of the softmax.
struct QueryPlace {
  int stored = 0;  // number among the stored queries
  int first = 0;   // sees [first, end)
  int end = 0;
  int own = -1;                                // its own key, -1 if that does not take part
  int moved = 0;                               // from where it was captured
  const BackwardRotation* rotation = nullptr;  // that of the keys, which outlives this
};

/// Moves a vector, with a table of sines and cosines if there is one; the bits are the same with and without it.
void rotate(const Rope& rope, const BackwardRotation* rotation, int distance, std::span<float> vector);

/// Places of `queries` (positions). Throws Error{input} where a query is not stored, Error{usage} where a query must
/// move to its slot and has none, or where the keys that it sees do not stand side by side.
std::vector<QueryPlace> query_places(const LayerTensors& layer, std::span<const std::int32_t> queries,
                                     const SoftmaxKeys& softmax_keys);

/// Pairs of a query at one of these positions and a key below `columns` that it sees, summed over the query heads.
double visible_pairs(const LayerTensors& layer, std::span<const std::int32_t> queries, int columns);

}  // namespace kvreplay
