// An unknown name among many that a command lists.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvreplay {

/// As nearest(); where that would enumerate many names, the three nearest and the command that lists them: "one of 56
/// names, such as A, B, C (see kvreplay policies)".
std::string nearest_listed(std::string_view name, std::vector<std::string> known, std::string_view command);

}  // namespace kvreplay
