// Results of format 1: parts/TRACE.h5 (format "kvpart", version 4) is a file of cells in which each cell's kept
// positions are bits, /sets/ID int64 [treated layers, H, words]. `kvreplay merge` alone reads it.
#pragma once

#include <filesystem>
#include <vector>

namespace kvreplay {

bool is_format_1(const std::filesystem::path& folder);

/// Throws Error{input} for a folder of format 1.
void refuse_format_1(const std::filesystem::path& folder);

/// Writes a file of cells for each part of the folder into `target`, and returns their paths. Throws Error{input} for
/// a file that is no part, or a damaged one.
std::vector<std::filesystem::path> convert_format_1(const std::filesystem::path& folder,
                                                    const std::filesystem::path& target);

}  // namespace kvreplay
