// Policies written in a file, for those that are too long for a command line.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace kvreplay {

/// The policies of a YAML file, in the form that ConfiguredPolicy::parse reads. The file is one policy or a list of
/// them; a policy is a text as on the command line, or a mapping whose key `policy` is the name and whose other keys
/// are parameters:
///   - snapkv:window=32
///   - policy: chunkkv
///     chunk: 20
/// Throws Error{input} for a file that cannot be read, Error{usage} for one that says something else.
std::vector<std::string> policies_of_file(const std::filesystem::path& path);

}  // namespace kvreplay
