// Memory of the device, within a limit.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace kvreplay {

/// Gives out blocks and takes them back. What was taken back is given out again, so that one trace after another needs
/// no new allocation; it goes to the driver only when the limit asks for it. Safe to share among threads.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t limit) : limit_(limit) {}
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  /// Throws Error{resources} with the sizes when it would not fit.
  void* take(std::size_t bytes);
  /// Work that was queued on it before must have ended, or be ordered before what the next owner queues.
  void give_back(void* block);

  std::size_t limit() const { return limit_; }

 private:
  std::size_t limit_;
  std::mutex mutex_;
  std::size_t allocated_ = 0;
  std::map<void*, std::size_t> taken_;
  std::multimap<std::size_t, void*> free_;
};

/// A block of numbers of the device that is kept from call to call.
template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(DeviceMemory& memory) : memory_(&memory) {}
  ~DeviceBuffer() { clear(); }
  DeviceBuffer(DeviceBuffer&& other) noexcept : memory_(other.memory_), data_(other.data_), count_(other.count_) {
    other.data_ = nullptr;
    other.count_ = 0;
  }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }

  /// Room for `count` numbers; what was there may be lost.
  T* at_least(std::size_t count) {
    if (count > count_ || data_ == nullptr) {
      clear();
      data_ = static_cast<T*>(memory_->take((count == 0 ? 1 : count) * sizeof(T)));
      count_ = count;
    }
    return data_;
  }
  T* data() const { return data_; }
  void clear() {
    if (data_ != nullptr) memory_->give_back(data_);
    data_ = nullptr;
    count_ = 0;
  }

 private:
  DeviceMemory* memory_;
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

}  // namespace kvreplay
