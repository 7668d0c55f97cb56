// Policies written in a file, for those that are too long for a command line.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "policies/text/yaml_file.h"

namespace kvreplay {

/// NAME[:KEY=VALUE,...], and the place in a file where it stands.
struct PolicyText {
  std::string text;
  std::string where;
};

/// One policy, or a list of them; a policy is a text as on the command line, or a mapping whose key `policy` is the
/// name and whose other keys are parameters. A value, or the name, may be a list: one policy for each of its values,
/// and for each combination where several are lists, the last varying fastest:
///   - snapkv:window=32
///   - policy: chunkkv
///     chunk: [10, 20]
/// Throws Error{usage} for what says something else.
std::vector<PolicyText> policies_of(const YamlNode& node);

/// What policies are to be left out, in the same form; without a name, "KEY=VALUE,..." alone stands for any.
std::vector<PolicyText> exclusions_of(const YamlNode& node);

/// The policies of a YAML file, in the form that ConfiguredPolicy::parse reads. Throws as read_yaml() and
/// policies_of(), and Error{usage} for a file without any.
std::vector<std::string> policies_of_file(const std::filesystem::path& path);

}  // namespace kvreplay
