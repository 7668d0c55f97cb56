// `kvreplay replay`, but for what it prints.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "analysis/run.h"
#include "arguments.h"
#include "trace/trace.h"

namespace kvreplay {

extern const Command replay_command;

/// Replays what a command line of replay_command asks for, without --output in memory; `in_memory`: the traces among
/// them that no file holds, which it names by their paths. Throws as run(), and Error{resources} where the plan does
/// not fit into memory or onto the disk.
RunSummary replay_traces(const Arguments& arguments, const std::vector<std::shared_ptr<const Trace>>& in_memory,
                         const std::function<void(const Progress&)>& progress,
                         const std::function<bool()>& asked_to_stop);

/// What --dry-run --json prints of it, a text in JSON.
std::string plan_json(const Arguments& arguments, const std::vector<std::shared_ptr<const Trace>>& in_memory);

}  // namespace kvreplay
