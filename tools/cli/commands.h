// The commands of the program, and the separate programs that it calls.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "command.h"

namespace kvreplay {

extern const Command completion_command;
extern const Command convert_command;
extern const Command diff_command;
extern const Command doctor_command;
extern const Command help_command;
extern const Command info_command;
extern const Command merge_command;
extern const Command metrics_command;
extern const Command new_policy_command;
extern const Command policies_command;
extern const Command replay_command;
extern const Command show_command;
extern const Command synth_command;
extern const Command validate_command;

std::span<const Command* const> commands();

/// Commands under a heading of help, among them commands in Python.
struct CommandGroup {
  const char* heading;
  std::vector<const Command*> commands;
};

/// Every command once, in the order of help.
std::vector<CommandGroup> command_groups();

const Command* find_command(std::string_view name);

/// What the program is, its commands, and its exit codes.
void print_overview();

/// One command with its options.
void print_help(const Command& command);

/// All commands with their options, as a page for man(1).
void print_manual();

/// Exit codes and their meanings.
std::span<const std::pair<const char*, const char*>> exit_codes();

inline constexpr const char* how_to_install_companions =
    "tools/setup build python, run in kvreplay's source folder, and .venv/bin on PATH";

/// Programs kvreplay-NAME that run as if they were commands: the commands in Python, whether or not they are installed.
/// Their `run` is null.
std::span<const Command> companions();

/// kvreplay-NAME beside this program, or on PATH.
std::optional<std::filesystem::path> find_companion(std::string_view name);

/// Becomes kvreplay-NAME with `arguments`. Throws Error{capability} when a known one is not installed, Error{usage}
/// with the nearest command when there is no such program.
[[noreturn]] void run_companion(const std::string& name, const std::vector<std::string>& arguments);

}  // namespace kvreplay
