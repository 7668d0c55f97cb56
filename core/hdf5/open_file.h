// Files as the system opens them, and what must be true of one before HDF5 sees it.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>
#include <utility>

namespace kvreplay {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor();
  int get() const { return fd_; }

 private:
  int fd_;
};

/// What tells a file from another that has taken its place, and from itself once it was written to.
struct FileIdentity {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::uint64_t length = 0;
  std::int64_t modified = 0;  // ns since 1970

  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

/// Throws Error{input}.
FileIdentity identity_of(const FileDescriptor& file, const std::string& where);

/// Neither a directory nor what an open may wait for. Throws Error{input}.
void require_file(const struct stat& status, const std::string& where);

/// A regular file, for reading. Throws Error{input}.
FileDescriptor open_file(const std::string& where, std::uint64_t& length);

/// It is an HDF5 file, its superblock is checksummed, and it ends where it says. Throws Error{input}.
void check_superblock(const FileDescriptor& file, std::uint64_t length, const std::string& where);

}  // namespace kvreplay
