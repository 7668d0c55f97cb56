#include "analysis/replaced_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "open_file.h"

namespace kvreplay {
namespace {

/// Of the system call that has just failed.
Unwritable failed(const std::filesystem::path& path) {
  const int reason = errno;
  const bool full = means_disk_full(reason);
  return {means_resources(reason) ? Refusal::resources : Refusal::input, path.string(),
          full ? "disk full" : "cannot be written", "", std::strerror(reason)};
}

bool bring_to_disk(const std::filesystem::path& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return false;
  const bool synced = fsync(descriptor) == 0;
  const int reason = errno;
  close(descriptor);
  errno = reason;
  return synced;
}

}  // namespace

ReplacedFile::ReplacedFile(std::filesystem::path path)
    : path_(std::move(path)), partial_(path_.string() + ".partial"), stream_(partial_, std::ios::binary) {
  if (!stream_) throw failed(partial_);
}

ReplacedFile::~ReplacedFile() {
  if (!finished_) unlink(partial_.c_str());
}

void ReplacedFile::write(std::string_view content) {
  if (!stream_.write(content.data(), static_cast<std::streamsize>(content.size()))) throw failed(partial_);
}

void ReplacedFile::complete() {
  if (complete_) return;
  errno = 0;
  stream_.close();
  if (!stream_ || !bring_to_disk(partial_)) throw failed(partial_);
  complete_ = true;
}

void ReplacedFile::finish() {
  complete();
  if (std::rename(partial_.c_str(), path_.c_str()) != 0) throw failed(path_);
  finished_ = true;
}

void replace_file(const std::filesystem::path& path, std::string_view content) {
  ReplacedFile file(path);
  file.write(content);
  file.finish();
}

void replace_file(const std::filesystem::path& path, std::span<const std::byte> content) {
  replace_file(path, std::string_view(reinterpret_cast<const char*>(content.data()), content.size()));
}

}  // namespace kvreplay
