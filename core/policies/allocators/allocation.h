// Budget allocation over layers and heads by ranking their entries together.
#pragma once

#include <cstdint>
#include <vector>

#include "policies/policy.h"

namespace kvreplay {

/// [H] Number of the layer's best `slots` candidates in each row, plus protected tokens; ties to the lower (head,
/// position).
std::vector<int> counts_of_best(const Division& division, const Matrix& scores, std::int64_t slots);

/// Ranks (head, position) of a layer together: its slots go to its best entries; ties to the lower (head, position).
/// Protected tokens are kept in every row.
std::vector<int> ranked_within_layer(const Division& division, const Matrix& scores);

/// Ranks (layer, head, position) of all layers together.
LayerCounts ranked_across_layers(const Division& division, LayerScores scores);

/// Ranks (matrix, row, column) of all matrices together: no tokens are protected.
LayerCounts ranked_slots(std::int64_t slots, LayerScores scores);

}  // namespace kvreplay
