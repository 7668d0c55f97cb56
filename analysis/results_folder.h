// The folder that a run writes into and that merge joins.
#pragma once

#include <filesystem>
#include <vector>

namespace kvreplay {

/// Whether it has what a run leaves, be it a run that was interrupted.
bool is_results_folder(const std::filesystem::path& folder);

/// Throws Error{input} for results of format 1, and Error{usage} unless results may be written there: there is nothing
/// yet, an empty folder, one of results, or one whose results are still in shards/.
void check_results_folder(const std::filesystem::path& folder);

/// With its cells/. Throws Error{usage}, or {resources} when the disk is full.
void make_results_folder(const std::filesystem::path& folder);

/// cells/*.h5 in the order of their traces' names. Throws Error{input} for results of format 1.
std::vector<std::filesystem::path> cell_files_of(const std::filesystem::path& folder);

}  // namespace kvreplay
