// A trace's bytes as the system maps them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <thread>

#include "open_file.h"

namespace kvreplay {

/// A range of addresses whose pages may go missing: kept for the handler of SIGBUS.
struct WatchedRange;

/// A file's bytes, read when they are touched. Bytes that are no longer there, because the file has become shorter or
/// its disk fails, read as 0, and require_unchanged() says so.
class Mapping {
 public:
  Mapping() = default;
  /// Throws Error{resources}.
  Mapping(FileDescriptor file, std::uint64_t length, const std::string& where);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  const std::byte* at(std::uint64_t offset) const { return base_ + offset; }
  bool holds(std::span<const std::byte> bytes) const { return bytes.data() >= base_ && bytes.data() < base_ + length_; }
  std::uint64_t offset_of(std::span<const std::byte> bytes) const {
    return static_cast<std::uint64_t>(bytes.data() - base_);
  }

  /// Throws Error{input} where the file was written to since it was mapped, or could not be read. Does nothing where no
  /// file is mapped.
  void require_unchanged() const;
  /// As it was when it was mapped.
  const FileIdentity& identity() const { return identity_; }

  /// Pages that the range touches are read ahead.
  void read_ahead(std::uint64_t offset, std::uint64_t bytes) const;
  /// Pages that lie wholly in the range are let go.
  void let_go(std::uint64_t offset, std::uint64_t bytes) const;
  void let_all_go() const;

 private:
  std::byte* base_ = nullptr;
  std::uint64_t length_ = 0;
  FileDescriptor file_;
  std::string where_;
  FileIdentity identity_;
  WatchedRange* watched_ = nullptr;
};

/// Lets the pages of a mapping go whenever about `limit` of them are resident, or while nobody says how many are. A
/// backend reads a layer as it likes, so this looks from beside, often enough that the half it leaves takes what comes
/// meanwhile: at most 30 MB a millisecond and hardware thread.
class MappedLimit {
 public:
  MappedLimit(const Mapping& mapping, std::size_t limit);

 private:
  std::jthread watcher_;
};

}  // namespace kvreplay
