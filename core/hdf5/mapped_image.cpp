#include "hdf5/mapped_image.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace kvreplay {

MappedImage::~MappedImage() { unmap(); }

void MappedImage::unmap() noexcept {
  if (base_ != nullptr) ::munmap(std::exchange(base_, nullptr), std::exchange(length_, 0));
}

void* MappedImage::resize(std::size_t bytes) noexcept {
  if (bytes <= length_) return base_;
  void* const grown =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (grown == MAP_FAILED) return nullptr;
  std::size_t in_file = in_file_;
  try {
    if (!problem_) {
      partial_.reserve(bytes);
      in_file = bytes;
    }
  } catch (const Error& error) {
    problem_ = error;
  }
  if (in_file > 0 &&
      ::mmap(grown, in_file, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, partial_.descriptor(), 0) == MAP_FAILED) {
    if (!problem_)
      problem_ = Error{Refusal::input, partial_.path().string(), "cannot be mapped", "", std::strerror(errno)};
    in_file = 0;
  }
  ::madvise(grown, bytes, MADV_DONTFORK);  // a child process that reads a damaged file may write anywhere
  auto* const bytes_of_grown = static_cast<std::byte*>(grown);
  if (length_ > in_file) std::memcpy(bytes_of_grown + in_file, base_ + in_file, length_ - in_file);
  unmap();
  base_ = bytes_of_grown;
  length_ = bytes;
  in_file_ = in_file;
  return base_;
}

void MappedImage::require_room() const {
  if (problem_) throw *problem_;
}

void MappedImage::complete() {
  require_room();
  unmap();
  partial_.trim();
}

void MappedImage::finish() { partial_.finish(); }

}  // namespace kvreplay
