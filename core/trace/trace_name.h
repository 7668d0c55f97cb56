// What a trace is called: results bear the name of its file.
#pragma once

#include <filesystem>
#include <string>

namespace kvreplay {

inline std::string trace_name(const std::filesystem::path& file) {
  return file.extension() == ".h5" ? file.stem().string() : file.filename().string();
}

}  // namespace kvreplay
