// What a harness asks of the code it feeds: kvreplay::Error may come out of it, a bug of ours or anything else may not.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>

#include "error.h"

namespace kvreplay {

/// Stops the program as libFuzzer expects it where a property does not hold.
inline void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "finding: %s\n", what.c_str());
  std::abort();
}

/// Whether `work` came to its end; false: it refused its input. Other exceptions reach libFuzzer, which counts them as
/// crashes.
template <class Work>
bool survives(Work work) {
  try {
    work();
    return true;
  } catch (const Error& error) {
    require(error.refusal() != Refusal::internal, error.what());
    return false;
  }
}

/// A folder of the process, gone when it ends as it should.
class OwnFolder {
 public:
  OwnFolder() : path_(std::filesystem::temp_directory_path() / ("kvreplay-fuzz-" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
  }
  OwnFolder(const OwnFolder&) = delete;
  OwnFolder& operator=(const OwnFolder&) = delete;
  ~OwnFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

  /// The file of that name, with these bytes alone.
  std::filesystem::path with(const std::string& name, std::span<const std::uint8_t> bytes) const {
    std::ofstream(path_ / name, std::ios::binary | std::ios::trunc)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace kvreplay
