// HDF5 files as other programs write them by default, rewritten in the form that traces must have.
#pragma once

#include <filesystem>
#include <functional>
#include <vector>

#include "error.h"
#include "trace/writer.h"

namespace kvreplay {

/// Writes `made` with the groups, attributes and datasets of `old`: superblock 2, strings of the fixed length of the
/// longest, contiguous datasets. All other numbers keep their types and bits. Links to other names or files are left
/// out, and so are sequences and references. `old` may be hostile: only a child process reads it (child_process.h).
///
/// Returns the violations that `made` would still have, named as objects of `old`; it is written only if there are
/// none. Throws Error{input} where `old` cannot be read or lacks elements, and where `made` exists and must not be
/// replaced; {resources} for a full disk; {interrupted} where `interrupted` says so.
std::vector<Error> convert(const std::filesystem::path& old, const std::filesystem::path& made, Existing existing,
                           const std::function<bool()>& interrupted);

}  // namespace kvreplay
