// An unknown name is answered with the nearest known one, or with all where they are few.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace kvreplay {

/// Begins the `expected` of an unknown name that has a near one: Error then words its line otherwise.
inline constexpr std::string_view suggestion = "did you mean ";

/// For Error's `expected`: "one of A, B, C" where at most four names are `known` or none is near, else "did you mean
/// A?" with the nearest name by edit distance. Numbers are not near each other.
std::string nearest(std::string_view name, std::span<const std::string> known);

}  // namespace kvreplay
