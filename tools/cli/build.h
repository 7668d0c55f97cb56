// Which build this is: what doctor shows and a run records.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace kvreplay {

std::string build_version();
/// The commit, with "+" when files differed from it; "unknown" where it was built without git.
std::string build_commit();
std::string build_compiler();
/// Name and version of each library.
std::vector<std::pair<std::string, std::string>> build_libraries();
/// "1.2.3 (commit)".
std::string build_line();

}  // namespace kvreplay
