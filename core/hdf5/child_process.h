// A damaged or hostile HDF5 file can crash the library, keep it busy for ever, or make it ask for all memory.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace kvreplay {

/// Runs `work`, which reads the file `path`, in a child process, and returns its text. The child may use 60 s of CPU
/// time and 1 s more for each MiB of the file, and 1 GiB of memory more than the file is long. Only files that `work`
/// writes outlive the child. Throws the Error that `work` throws; Error{input} if the child crashes or exceeds a limit;
/// Error{resources} if no child can be created; Error{interrupted}, once the child has ended, if `interrupted` says so.
std::string run_in_child(const std::filesystem::path& path, const std::function<std::string()>& work,
                         const std::function<bool()>& interrupted);

}  // namespace kvreplay
