// Files that are there whole or not at all: NAME.partial is written, brought to the disk and renamed.
#pragma once

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <span>
#include <string_view>

#include "error.h"

namespace kvreplay {

/// A file that cannot be written, whatever the work that it was to hold.
class Unwritable : public Error {
 public:
  using Error::Error;
};

/// What an earlier, killed run left as NAME.partial is overwritten. Throws Unwritable, with Refusal::resources when the
/// disk is full; the file of that name is then as it was, and NAME.partial gone.
class ReplacedFile {
 public:
  explicit ReplacedFile(std::filesystem::path path);
  ReplacedFile(const ReplacedFile&) = delete;
  ReplacedFile& operator=(const ReplacedFile&) = delete;
  ~ReplacedFile();
  void write(std::string_view content);
  /// All of it is on the disk; nothing is written any more.
  void complete();
  /// Completes it. The name exists afterwards.
  void finish();

 private:
  std::filesystem::path path_, partial_;
  std::ofstream stream_;
  bool complete_ = false, finished_ = false;
};

void replace_file(const std::filesystem::path& path, std::string_view content);
void replace_file(const std::filesystem::path& path, std::span<const std::byte> content);

}  // namespace kvreplay
