#include "open_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "error.h"

namespace kvreplay {

bool means_disk_full(int system_error) {
  return system_error == ENOSPC || system_error == EDQUOT || system_error == EFBIG;
}

bool means_resources(int system_error) {
  return means_disk_full(system_error) || system_error == EMFILE || system_error == ENFILE || system_error == ENOMEM;
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

namespace {

FileIdentity identity_of(const struct stat& status) {
  return {status.st_dev, status.st_ino, static_cast<std::uint64_t>(status.st_size),
          status.st_mtim.tv_sec * std::int64_t{1'000'000'000} + status.st_mtim.tv_nsec};
}

}  // namespace

std::optional<FileIdentity> identity_at(const std::string& path) {
  struct stat status{};
  return ::stat(path.c_str(), &status) == 0 ? std::optional(identity_of(status)) : std::nullopt;
}

FileIdentity identity_of(const FileDescriptor& file, const std::string& where) {
  struct stat status{};
  if (::fstat(file.get(), &status) != 0)
    throw Error{Refusal::input, where, std::string("can no longer be read: ") + std::strerror(errno)};
  return identity_of(status);
}

void require_file(const struct stat& status, const std::string& where) {
  if (!S_ISREG(status.st_mode))
    throw Error{Refusal::input, where, "kind", "a file", S_ISDIR(status.st_mode) ? "a directory" : "a device or pipe"};
}

FileDescriptor open_file(const std::string& where, std::uint64_t& length) {
  FileDescriptor file{::open(where.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.get() < 0)
    throw Error{means_resources(errno) ? Refusal::resources : Refusal::input, where,
                std::string("cannot be opened: ") + std::strerror(errno)};
  struct stat status{};
  if (::fstat(file.get(), &status) != 0)
    throw Error{Refusal::input, where, std::string("cannot be read: ") + std::strerror(errno)};
  require_file(status, where);
  length = static_cast<std::uint64_t>(status.st_size);
  return file;
}

std::string read_file(const std::string& where) {
  std::uint64_t length = 0;
  const FileDescriptor file = open_file(where, length);
  std::string bytes(length, '\0');
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t read = ::read(file.get(), bytes.data() + done, bytes.size() - done);
    if (read < 0 && errno == EINTR) continue;
    if (read <= 0)
      throw Error{Refusal::input, where, "cannot be read", "", read < 0 ? std::strerror(errno) : "its end"};
    done += static_cast<std::size_t>(read);
  }
  return bytes;
}

}  // namespace kvreplay
