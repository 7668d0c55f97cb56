// The random twin of a kept set: as many tokens, in runs of the same lengths, at random places.
#pragma once

#include <cstdint>
#include <vector>

#include "policies/policy.h"

namespace kvreplay {

inline constexpr const char* random_twin_name = "random-twin";

/// The kept positions of a row's random twin. Protected tokens are kept as they are. Between them, the maximal runs of
/// kept positions and the gaps around them are permuted: runs in the order of chain(seed, layer, row, i), gaps in the
/// order of chain(seed, layer, row, i, 1), i the number of the run or gap from the left. The first gap comes first.
/// `layer` is the stored number of the layer that the set belongs to, `row` the row's number in the set.
std::vector<std::int32_t> random_twin(const Kept& kept, int prompt, std::uint64_t seed, int layer, int row);

}  // namespace kvreplay
