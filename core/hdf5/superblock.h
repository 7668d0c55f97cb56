// What must be true of a file before HDF5 sees it.
#pragma once

#include <cstdint>
#include <string>

#include "open_file.h"

namespace kvreplay {

/// It is an HDF5 file, its superblock is checksummed, and it ends where it says. Throws Error{input}.
void check_superblock(const FileDescriptor& file, std::uint64_t length, const std::string& where);

}  // namespace kvreplay
