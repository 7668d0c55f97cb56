// How far apart two names are.
#pragma once

#include <cstddef>
#include <string_view>

namespace kvreplay {

/// The Levenshtein distance; upper and lower case are equal.
std::size_t edit_distance(std::string_view a, std::string_view b);

}  // namespace kvreplay
