// A damaged HDF5 file can crash the library that opens it, or keep it busy for ever. So a child process goes first.
#pragma once

#include <filesystem>

namespace kvreplay {

/// A child process opens an HDF5 file and looks up everything that hard links lead to: attributes, types, shapes,
/// storage, where each chunk lies, and how much a deflated one holds. Throws Error{input} where that ends the child,
/// takes it more than five seconds and one for each MiB, or more than 1 GiB of memory beside the file's own size, and
/// where HDF5 refuses any of it: failures are what the library survives least. Error{resources} where no child can be
/// made. That a file cannot be opened is left to the caller, who will hear of it in the caller's own words. A file
/// whose walk went well is walked again only if it has changed since, or less than two seconds before it.
void walk_in_child(const std::filesystem::path& path);

}  // namespace kvreplay
