// Policies in files that users name: "mine.py:my_policy" is the policy my_policy of the file mine.py.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace kvreplay {

/// Enters the policy of a Python file into policies(), and gives the name that it has there. Throws Error{input} for a
/// file that cannot be read, Error{usage} for a policy that is not in it, Error{capability} where Python is missing.
/// Empty: no name is read as that of a file.
std::function<std::string(const std::string& file, const std::string& policy)>& python_policy_reader();

/// Where the name of a policy ends that `text` begins with: at its ':', or with the text.
std::size_t end_of_policy_name(std::string_view text);

/// The name in policies() of a policy that a user names, which is read from its file first if it is in one. In the name
/// of a built-in policy, case, '-', '_' and kvpress's suffix Press do not count: SnapKVPress is snapkv. A card may have
/// further names. An unknown name is returned unchanged.
std::string registered_policy(std::string_view name);

/// Whether the name is that of a class of kvpress: a built-in policy with the suffix, as SnapKVPress.
bool is_press(std::string_view name);

/// Policies as users write them, with every file that they name by a relative path in `folder`: mine.py:my_policy, and
/// tables such as mine.npy. Throws Error{usage} where the folder's name would end the file's.
std::string with_files_in(const std::filesystem::path& folder, std::string_view policies);

}  // namespace kvreplay
