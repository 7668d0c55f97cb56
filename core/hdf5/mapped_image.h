// The image of an HDF5 file that is written, as large as it may become: a mapping of NAME.partial, not memory.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>

#include "error.h"
#include "hdf5/partial_file.h"

namespace kvreplay {

/// HDF5 survives no write that fails half-way, so none does: room on the disk is reserved whenever the image grows, and
/// where there is none the image goes on in memory until whoever writes it asks.
class MappedImage {
 public:
  explicit MappedImage(const std::filesystem::path& name) : partial_(name) {}
  MappedImage(const MappedImage&) = delete;
  MappedImage& operator=(const MappedImage&) = delete;
  ~MappedImage();

  /// At least `bytes` of it, a multiple of the page size, wherever they lie now; null: there are no addresses.
  /// Pages that were touched before are let go.
  void* resize(std::size_t bytes) noexcept;
  /// To be asked while it grows, and in the end. Throws as PartialFile does, Error{resources} for a full disk.
  void require_room() const;
  /// HDF5 has closed it: all of it is on the disk. Throws as `require_room`.
  void complete();
  /// The complete file gets its name.
  void finish();

 private:
  void unmap() noexcept;

  PartialFile partial_;
  std::byte* base_ = nullptr;
  std::size_t length_ = 0;
  std::size_t in_file_ = 0;  // its first bytes; others are memory, once there is a problem
  std::optional<Error> problem_;
};

}  // namespace kvreplay
