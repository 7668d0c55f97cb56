// run.json: how a run came about and how it ended.
#pragma once

#include <chrono>
#include <string>

#include "analysis/run.h"

namespace kvreplay {

/// "done", "skipped" or "failed".
const char* word(CellState state);

/// The text of run.json. `backend` is the backend's own description.
std::string run_json(const RunRequest& request, const RunSummary& summary, const std::string& backend,
                     std::chrono::system_clock::time_point start, std::chrono::system_clock::time_point end);

}  // namespace kvreplay
