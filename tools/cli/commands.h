// The commands of the program, and the separate programs that it calls.
#pragma once

#include <span>
#include <string>
#include <string_view>

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
extern const Command synth_command;
extern const Command validate_command;

/// In the order of help.
std::span<const Command* const> commands();

const Command* find_command(std::string_view name);

}  // namespace kvreplay
