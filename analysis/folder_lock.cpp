#include "analysis/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>

#include "error.h"

namespace kvreplay {

FolderLock::FolderLock(const std::filesystem::path& folder) : FolderLock(folder, LOCK_EX) {}

FolderLock FolderLock::for_reading(const std::filesystem::path& folder) { return {folder, LOCK_SH}; }

FolderLock::FolderLock(const std::filesystem::path& folder, int operation)
    : descriptor_(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (descriptor_ < 0 || flock(descriptor_, operation | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  close(descriptor_);
  refuse_second_run(folder);
}

FolderLock::~FolderLock() {
  if (descriptor_ >= 0) close(descriptor_);
}

void refuse_second_run(const std::filesystem::path& folder) {
  throw Error{Refusal::usage, folder.string(),
              "another run is writing to this folder; wait for it, or use another folder"};
}

}  // namespace kvreplay
