// Memory for vectors, kept from call to call: first-touch page faults of fresh memory cost more than the products in
// it.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace kvreplay {

/// a * b elements, which may be more than an int holds.
constexpr std::size_t product(int a, int b) { return static_cast<std::size_t>(a) * static_cast<std::size_t>(b); }

template <class T>
class AlignedBuffer {
 public:
  /// At least `count` elements with no particular values; what was there before is lost when it has to grow.
  T* at_least(std::size_t count) {
    if (count > count_) {
      elements_.reset();
      count_ = 0;
      const std::size_t bytes = (count * sizeof(T) + alignment - 1) / alignment * alignment;
      elements_ = {allocated(bytes), Free{bytes}};
      count_ = count;
    }
    return elements_.get();
  }
  T* data() { return elements_.get(); }
  const T* data() const { return elements_.get(); }

 private:
  static constexpr std::size_t alignment = 4096;
  /// From here on memory is mapped, in pages of this size where the system has some: fewer page faults, fewer misses of
  /// their addresses, and nothing stays behind in a heap.
  static constexpr std::size_t huge_page = std::size_t{1} << 21;

  static T* allocated(std::size_t bytes) {
    if (bytes < huge_page) {
      void* const elements = std::aligned_alloc(alignment, bytes);
      if (elements == nullptr) throw std::bad_alloc();
      return static_cast<T*>(elements);
    }
    void* const elements = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (elements == MAP_FAILED) throw std::bad_alloc();
    ::madvise(elements, bytes, MADV_HUGEPAGE);
    return static_cast<T*>(elements);
  }
  struct Free {
    std::size_t bytes = 0;
    void operator()(T* elements) const {
      if (bytes < huge_page)
        std::free(elements);
      else
        ::munmap(elements, bytes);
    }
  };
  std::unique_ptr<T[], Free> elements_;
  std::size_t count_ = 0;
};

}  // namespace kvreplay
