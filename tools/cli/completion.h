// What shells offer while a command line is typed.
#pragma once

#include <span>
#include <string>

namespace kvreplay {

/// For the scripts that `kvreplay completion` prints. `words` are those behind the program's name, up to the one at the
/// cursor, which may be empty. Prints each word that may stand there, a tab, and its meaning; FILE for a file's name.
void print_candidates(std::span<const std::string> words);

}  // namespace kvreplay
