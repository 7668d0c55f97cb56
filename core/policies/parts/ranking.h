// Ranking by score, ties to the lower position: the one order in which tokens stay.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvreplay {

/// Indices of the `count` largest scores, ascending; of equal scores the lower index stays.
std::vector<std::int32_t> largest(std::span<const double> scores, int count);

}  // namespace kvreplay
