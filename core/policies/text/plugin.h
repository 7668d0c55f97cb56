// Policies that are compiled apart, against the kit's headers alone, and loaded while the program runs.
//
// A plug-in is a shared library whose bytes hold a stamp, "kvreplay-plugin:VERSION (ABI)". It is read before the
// library is opened, because opening it runs its registrations: whatever was built for something else never runs.
#pragma once

#include <filesystem>
#include <string>

namespace kvreplay {

/// Registers the policies and parts of a plug-in, all of them or none; they carry its path and content hash as Source.
/// Returns the hash. A file that is loaded already does nothing. Threads may load at once. Throws Error{input} for a
/// file that is no plug-in, that is cut off, or whose names are taken, Error{capability} for one that was made for
/// another kvreplay, compiler or machine. Bytes that are damaged in another way are run as they are: the system's
/// loader has no checksum.
std::string load_plugin(const std::filesystem::path& path);

}  // namespace kvreplay
