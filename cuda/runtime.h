// CUDA's runtime with every call checked and every thing owned.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>
#include <utility>

#include "error.h"

namespace kvreplay {

/// Throws what the runtime says: Error{internal}, or Error{resources} where memory is short.
inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  const bool memory = status == cudaErrorMemoryAllocation;
  throw Error{memory ? Refusal::resources : Refusal::internal, "CUDA", call, "success",
              std::string(cudaGetErrorName(status)) + ", " + cudaGetErrorString(status)};
}

class Event {
 public:
  Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags"); }
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }

  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void wait() const { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  void hold_back(cudaStream_t stream) const { check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent"); }

 private:
  cudaEvent_t event_ = nullptr;
};

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }
  void wait() const { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Host memory that the device copies from and to by itself.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  ~PinnedMemory() {
    if (memory_ != nullptr) cudaFreeHost(memory_);
  }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* at_least(std::size_t bytes) {
    if (bytes > size_) {
      if (memory_ != nullptr) check(cudaFreeHost(std::exchange(memory_, nullptr)), "cudaFreeHost");
      size_ = 0;
      const std::size_t more = bytes + bytes / 4;  // the next may be a little larger
      check(cudaMallocHost(&memory_, more), "cudaMallocHost");
      size_ = more;
    }
    return static_cast<std::byte*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kvreplay
