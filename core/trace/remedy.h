// What the author of a file does about a violation of the format.
#pragma once

#include <string>

#include "error.h"

namespace kvreplay {

/// The command that rewrites the file with a new superblock and strings of fixed length.
std::string conversion_of(const std::string& file);

/// The same error, whose line ends with a remedy: "...; write int32 [T] (token numbers, prompt and continuation)".
Error with_remedy(const Error& violation, const std::string& file);

}  // namespace kvreplay
