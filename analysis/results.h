// The files of a run, assembled from its parts: results.csv, seconds.csv, selections.h5. No time and no date is in
// results.csv or selections.h5: equal runs have equal files.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace kvreplay {

/// How much of the values results.csv shows: the means over all layers; each layer too; each head too.
enum class Detail { summary, layer, head };

/// "summary", "layer" or "head"; throws Error{usage}.
Detail parse_detail(std::string_view text);

/// And back.
const char* word(Detail detail);

/// The columns of results.csv, in their order.
std::span<const std::string> result_columns();

/// Replaces results.csv, seconds.csv and selections.h5 in `output` by what output/parts/*.h5 hold.
void assemble(const std::filesystem::path& output, Detail detail);

}  // namespace kvreplay
