// kvreplay COMMAND ...: results on stdout, everything else on stderr, the exit code says what became of it.
#pragma once

#include <string>
#include <vector>

namespace kvreplay {

/// `program` is argv[0], `words` what follows. Returns the exit code; nothing is thrown.
int run_program(const std::string& program, const std::vector<std::string>& words);

}  // namespace kvreplay
