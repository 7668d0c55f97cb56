// `kvreplay replay`, but for what it prints.
#pragma once

#include <functional>

#include "analysis/run.h"
#include "arguments.h"

namespace kvreplay {

extern const Command replay_command;

/// Replays what a command line of replay_command asks for. Throws as run(), and Error{resources} where the plan does
/// not fit into memory or onto the disk.
RunSummary replay_traces(const Arguments& arguments, const std::function<void(const Progress&)>& progress,
                         const std::function<bool()>& asked_to_stop);

}  // namespace kvreplay
