#include "commands.h"

namespace kvreplay {
namespace {

constexpr const Command* table[] = {&doctor_command,   &synth_command,      &info_command,    &validate_command,
                                    &convert_command,  &replay_command,     &merge_command,   &diff_command,
                                    &policies_command, &new_policy_command, &metrics_command, &completion_command,
                                    &help_command};

}  // namespace

std::span<const Command* const> commands() { return table; }

const Command* find_command(std::string_view name) {
  for (const Command* command : commands())
    if (command->name == name) return command;
  return nullptr;
}

}  // namespace kvreplay
