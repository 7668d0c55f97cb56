// The file behind an HDF5 file that is being written: NAME.partial, which gets its name when it is whole. Room is
// reserved before it is needed, because HDF5 cannot close a file that it fails to write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "open_file.h"

namespace kvreplay {

/// Failures are Error{resources} for a full disk, {input} otherwise. One that is destroyed before finish() is removed.
class PartialFile {
 public:
  /// Empty, and locked until it is destroyed; the system takes the lock back however the process ends. Throws
  /// Error{input} while another process writes it.
  explicit PartialFile(const std::filesystem::path& name);
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;
  ~PartialFile();

  /// NAME.partial
  const std::filesystem::path& path() const { return partial_; }

  /// The file's first `end` bytes and some more exist from now on.
  void reserve(std::uint64_t end);
  /// HDF5 has cut the file to what it uses, as it does when it makes or flushes one: some more exists again.
  void reserve_again();
  /// Into what was reserved.
  void write(std::uint64_t offset, std::span<const std::byte> bytes) const;
  void sync() const;

  /// HDF5 has closed it: what was reserved and not used is given back, and all of it is on the disk.
  void trim();
  /// Makes NAME this file.
  void finish();

 private:
  std::uint64_t size() const;

  std::filesystem::path name_, partial_;
  FileDescriptor file_;
  std::uint64_t reserved_ = 0;  // bytes that exist on the disk
  bool finished_ = false;
};

}  // namespace kvreplay
