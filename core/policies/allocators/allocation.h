// How the budget is divided over layers and heads by ranking their entries together.
#pragma once

#include <cstdint>
#include <vector>

#include "policies/policy.h"

namespace kvreplay {

/// [H] How many of the layer's best `slots` candidates each row has, and with them what stays by rule; ties to the
/// lower (head, position).
std::vector<int> counts_of_best(const Division& division, const Matrix& scores, std::int64_t slots);

/// Ranks (head, position) of a layer together: its slots go to its best entries; ties to the lower (head, position).
/// Tokens that stay by rule stay in every row.
WithinLayer ranked_within_layer();

/// Ranks (layer, head, position) of all layers together.
AcrossLayers ranked_across_layers();

/// Ranks (matrix, row, column) of all matrices together: nothing stays by rule.
SlotDivision ranked_slots();

}  // namespace kvreplay
