// Files that are there whole or not at all: NAME.partial is written, brought to the disk and renamed.
#pragma once

#include <filesystem>
#include <fstream>
#include <string_view>

namespace kvreplay {

/// What an earlier, killed run left as NAME.partial is overwritten. Throws Error{resources} when the disk is full; the
/// file of that name is then as it was.
class ReplacedFile {
 public:
  explicit ReplacedFile(std::filesystem::path path);
  void write(std::string_view content);
  /// The name exists afterwards.
  void finish();

 private:
  std::filesystem::path path_, partial_;
  std::ofstream stream_;
};

void replace_file(const std::filesystem::path& path, std::string_view content);

}  // namespace kvreplay
