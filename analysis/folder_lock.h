// One run writes into a folder at a time, and nobody takes results from it then.
#pragma once

#include <filesystem>

namespace kvreplay {

/// A lock on a folder that the system takes back when the process ends, however it ends. A file system without locks
/// is used without. Throws Error{usage} when another run holds it.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder);
  /// Of one who reads: others may read as well.
  static FolderLock for_reading(const std::filesystem::path& folder);
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

 private:
  FolderLock(const std::filesystem::path& folder, int operation);

  int descriptor_;
};

/// What the run that comes second is told.
[[noreturn]] void refuse_second_run(const std::filesystem::path& folder);

}  // namespace kvreplay
