// Help, written from the commands' declarations.
#pragma once

#include "command.h"

namespace kvreplay {

/// What the program is, its commands, and its exit codes.
void print_overview();

/// One command with its options.
void print_help(const Command& command);

}  // namespace kvreplay
