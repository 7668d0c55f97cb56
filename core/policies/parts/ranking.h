// Ranking by score, ties to the lower position: the one order in which tokens stay.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvreplay {

/// All indices, best first; of equal scores the lower index comes first.
std::vector<std::int32_t> ranked(std::span<const double> scores);

/// Indices of the `count` best, ascending.
std::vector<std::int32_t> largest(std::span<const double> scores, int count);

}  // namespace kvreplay
