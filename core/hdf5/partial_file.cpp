#include "hdf5/partial_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <system_error>

#include "error.h"

namespace kvreplay {
namespace {

/// Room that is always reserved beyond what is asked for, so that HDF5's own small writes find the disk not full.
constexpr std::uint64_t headroom = std::uint64_t{1} << 20;

Error system_failure(int code, const std::string& where, const std::string& what) {
  if (means_disk_full(code)) return {Refusal::resources, where, "disk full"};
  return {means_resources(code) ? Refusal::resources : Refusal::input, where, what + ": " + std::strerror(code)};
}

/// A directory's entry for a file is as durable as the directory.
void sync_directory(const std::filesystem::path& directory) {
  const FileDescriptor opened{::open(directory.empty() ? "." : directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  if (opened.get() >= 0) ::fsync(opened.get());  // some file systems have none to sync
}

/// Whether `path` still names the open file: between opening and locking, its writer may have renamed or removed it.
bool names(const std::filesystem::path& path, const FileDescriptor& file) {
  struct stat of_path{}, of_file{};
  return ::stat(path.c_str(), &of_path) == 0 && ::fstat(file.get(), &of_file) == 0 &&
         of_path.st_ino == of_file.st_ino && of_path.st_dev == of_file.st_dev;
}

/// A file system without locks is used without.
FileDescriptor open_locked(const std::filesystem::path& path) {
  for (;;) {
    FileDescriptor file{::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)};
    if (file.get() < 0) throw system_failure(errno, path.string(), "cannot be made");
    if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
      throw Error{Refusal::input, path.string(), "another program is writing this file"};
    if (names(path, file)) return file;
  }
}

}  // namespace

PartialFile::PartialFile(const std::filesystem::path& name)
    : name_(name), partial_(name.string() + ".partial"), file_(open_locked(partial_)) {
  if (::ftruncate(file_.get(), 0) != 0) throw system_failure(errno, partial_.string(), "cannot be emptied");
}

PartialFile::~PartialFile() {
  if (!finished_) ::unlink(partial_.c_str());
}

void PartialFile::reserve(std::uint64_t end) {
  if (end + headroom <= reserved_) return;
  const int code =
      ::posix_fallocate(file_.get(), static_cast<off_t>(reserved_), static_cast<off_t>(end + headroom - reserved_));
  if (code != 0) throw system_failure(code, partial_.string(), "cannot grow");
  reserved_ = end + headroom;
}

void PartialFile::reserve_again() {
  reserved_ = 0;
  reserve(size());
}

std::uint64_t PartialFile::size() const {
  struct stat status{};
  if (::fstat(file_.get(), &status) != 0) throw system_failure(errno, partial_.string(), "cannot be read");
  return static_cast<std::uint64_t>(status.st_size);
}

void PartialFile::write(std::uint64_t offset, std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(file_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw system_failure(errno, partial_.string(), "cannot be written");
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

void PartialFile::sync() const {
  if (::fsync(file_.get()) != 0) throw system_failure(errno, partial_.string(), "cannot be synced");
}

void PartialFile::trim() {
  // The superblock says where the file ends.
  std::uint64_t end = 0;
  if (::pread(file_.get(), &end, sizeof end, 28) != sizeof end ||
      ::ftruncate(file_.get(), static_cast<off_t>(end)) != 0)
    throw system_failure(errno, partial_.string(), "cannot be trimmed");
  sync();
}

void PartialFile::finish() {
  if (std::rename(partial_.c_str(), name_.c_str()) != 0) throw system_failure(errno, name_.string(), "cannot be made");
  finished_ = true;
  sync_directory(name_.parent_path());
}

}  // namespace kvreplay
