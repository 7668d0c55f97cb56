// Files as the system opens them.
#pragma once

#include <sys/stat.h>

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace kvreplay {

/// Whether this errno says that there is no more room: disk, quota, or the size that a file may have.
bool means_disk_full(int system_error);
/// Or that the system has no more of something else: open files, memory.
bool means_resources(int system_error);

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

  friend auto operator<=>(const FileIdentity&, const FileIdentity&) = default;
};

/// Of what stands under the name; none: nothing does, or it cannot be asked about.
std::optional<FileIdentity> identity_at(const std::string& path);
/// Throws Error{input}.
FileIdentity identity_of(const FileDescriptor& file, const std::string& where);

/// Neither a directory nor what an open may wait for. Throws Error{input}.
void require_file(const struct stat& status, const std::string& where);

/// A regular file, for reading. Throws Error{input}.
FileDescriptor open_file(const std::string& where, std::uint64_t& length);

/// The bytes of a regular file. Throws Error{input}.
std::string read_file(const std::string& where);

}  // namespace kvreplay
