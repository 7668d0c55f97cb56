// A finished run as its folder has it.
#pragma once

#include <filesystem>

#include "analysis/run.h"

namespace kvreplay {

/// The summary that replay returned, without `about`. Of a folder with results of several calls: the cells of the last
/// one, in its order, then those of earlier ones. Cells also have the numbers that `kvreplay live` has written. Throws
/// Error{input} where the folder has no finished run.
RunSummary read_run(const std::filesystem::path& folder);

}  // namespace kvreplay
