// Programs kvreplay-NAME that run as if they were commands, such as the Python tools.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvreplay {

/// One that belongs to kvreplay, whether or not it is installed.
struct Companion {
  const char* name;
  const char* summary;
};

inline constexpr const char* how_to_install_companions =
    "tools/setup build python in kvreplay's source folder, and .venv/bin on PATH";

std::span<const Companion> companions();

/// kvreplay-NAME beside this program, or on PATH.
std::optional<std::filesystem::path> find_companion(std::string_view name);

/// Becomes kvreplay-NAME with `arguments`. Throws Error{capability} when a known one is not installed, Error{usage}
/// with the nearest command when there is no such program.
[[noreturn]] void run_companion(const std::string& name, const std::vector<std::string>& arguments);

}  // namespace kvreplay
