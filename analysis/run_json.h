// run.json: how a run came about and how it ended.
#pragma once

#include <chrono>
#include <exception>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "analysis/run.h"

namespace kvreplay {

/// In the self-check, where nothing was replayed whose errors must be 0.
inline constexpr const char* full_not_replayed = "full not replayed";

/// "done", "skipped" or "failed".
const char* word(CellState state);

/// Entries of the lists `inputs` and `cells` of run.json.
nlohmann::ordered_json input_json(const TraceRecord& trace);
nlohmann::ordered_json cell_json(const CellRecord& cell);
/// And back.
CellRecord cell_of(const nlohmann::ordered_json& cell);

/// Throws Error{input} for a file of another schema, and nlohmann's exceptions for text that is not JSON.
nlohmann::ordered_json read_run_json(const std::filesystem::path& path);
/// Answers such an exception, and those of entries of other types.
Error invalid_run_json(const std::filesystem::path& path, const std::exception& problem);

/// The text of run.json. `backend` is the backend's own description.
std::string run_json(const RunRequest& request, const RunSummary& summary, const std::string& backend,
                     std::chrono::system_clock::time_point start, std::chrono::system_clock::time_point end);

}  // namespace kvreplay
