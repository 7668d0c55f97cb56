// An unknown name is answered with the nearest known one.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace kvreplay {

/// "NEAREST" by edit distance when something is near, else all `known` names, comma-separated: for Error's `expected`.
std::string nearest(std::string_view name, std::span<const std::string> known);

}  // namespace kvreplay
