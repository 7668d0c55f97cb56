// Memory for vectors, kept from call to call: first-touch page faults of fresh memory cost more than the products in
// it.
#pragma once

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
      elements_.reset(static_cast<T*>(std::aligned_alloc(alignment, bytes)));
      if (elements_ == nullptr) throw std::bad_alloc();
      count_ = count;
    }
    return elements_.get();
  }
  T* data() { return elements_.get(); }
  const T* data() const { return elements_.get(); }

 private:
  static constexpr std::size_t alignment = 4096;
  struct Free {
    void operator()(T* elements) const { std::free(elements); }
  };
  std::unique_ptr<T[], Free> elements_;
  std::size_t count_ = 0;
};

}  // namespace kvreplay
