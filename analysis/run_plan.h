// What a run will do: traces opened and checked, their conditions, and the cells that are missing from the results.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "analysis/run_work.h"

namespace kvreplay {

/// One for each trace of the request; a trace that cannot be opened has an error. Throws as PlannedRun does.
std::vector<TraceWork> planned_work(const RunRequest& request);

/// The trace that was opened when the run was planned, or a file of the same hash in its place.
std::shared_ptr<const Trace> opened(const RunRequest& request, const TraceWork& work);

/// One line for each budget, in tokens or bytes, that holds whole prompts.
std::vector<std::string> budgets_above_prompt(const RunRequest& request, std::span<const TraceWork> works);

/// One line for each budget that protected tokens fill in some policy of the request.
std::vector<std::string> budgets_of_protected_tokens(const RunRequest& request, std::span<const TraceWork> works);

/// One line for each policy of which a query reads more tokens than some budget of the request, with the smallest one.
std::vector<std::string> budgets_below_reads(std::span<const TraceWork> works);

}  // namespace kvreplay
