// Tensors that other engines wrote in pieces, joined into a trace. The format is docs/staging.md.
#pragma once

#include <filesystem>
#include <functional>
#include <span>

#include "trace/writer.h"

namespace kvreplay {

/// Whether `path` is a folder or begins as a safetensors file does.
bool is_staged(const std::filesystem::path& path);

/// Joins the pieces in `inputs`, folders or files, into the trace `made`. Pieces are copied one by one, so memory does
/// not depend on their number. Throws Error{input} that names the file and the tensor or the object; {resources} for a
/// full disk; {interrupted} where `interrupted` says so.
void join_staged(std::span<const std::filesystem::path> inputs, const std::filesystem::path& made, Existing existing,
                 const std::function<bool()>& interrupted);

}  // namespace kvreplay
