// Keys and values of kept tokens as a store gives them back.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "replay/replay.h"

namespace kvreplay {

/// float32 keys of a layer, [Hkv, T, d], or [Hq, T, d] where each query head has a set of its own, with the kept ones
/// at their slots, as their distances from queries after the prompt see them: slot i of n kept tokens stands n - i
/// before the first of these.
std::vector<float> keys_at_slots(const LayerView& view, const LayerSelection& selection);

/// What each query reads of a layer at each of these budgets; without `at` if it reads everything. A budget of P or
/// more is everything, unless the schedule ignores it.
std::vector<QueryReads> reads_of(const Plan& plan, const LayerView& view, std::span<const int> budgets);

/// A layer of a cell, as Sink::selected gets it; `moves`: kept keys stand at their slots.
using StoreApplied =
    std::function<void(const LayerView&, const LayerSelection&, const StoredLayer* stored, bool moves)>;

/// Applies the store of a cell whose sets are `known` to one treated layer, and tells the result.
void apply_store(Backend& backend, const Trace& trace, const Conditions& conditions, const Cell& cell, int layer,
                 const StoreApplied& heard);

}  // namespace kvreplay
