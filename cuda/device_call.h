// What one call of the backend has on the device: taken when it begins, given back when it ends, whatever happens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <span>
#include <vector>

#include "cuda/cuda_backend.h"
#include "cuda/runtime.h"

namespace kvreplay {

class DeviceCall {
 public:
  /// Within another, it ends first.
  explicit DeviceCall(CudaBackend& backend) : backend_(backend), staged_before_(backend.staged_in_use_) {
    check(cudaSetDevice(backend.device_), "cudaSetDevice");
    bad_ = zeros<int>(1);
  }
  ~DeviceCall() {
    cudaStreamSynchronize(stream());
    backend_.staged_in_use_ = staged_before_;
  }
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  cudaStream_t stream() const { return backend_.stream_.get(); }
  DeviceMemory& memory() { return backend_.memory_; }
  DeviceTensors& tensors() { return backend_.tensors_; }
  int threads() const { return backend_.threads_; }
  bool warp_groups() const { return backend_.warp_groups_; }

  /// Room for `count` numbers on the device, for as long as the call lasts.
  template <class T>
  T* room(std::size_t count) {
    return reinterpret_cast<T*>(
        blocks_.emplace_back(backend_.memory_).at_least(std::max<std::size_t>(1, count) * sizeof(T)));
  }
  template <class T>
  T* zeros(std::size_t count) {
    T* made = room<T>(count);
    check(cudaMemsetAsync(made, 0, std::max<std::size_t>(1, count) * sizeof(T), stream()), "cudaMemsetAsync");
    return made;
  }
  /// A copy on the device.
  template <class T>
  T* copy(std::span<const T> numbers) {
    T* made = room<T>(numbers.size());
    if (numbers.empty()) return made;
    std::byte* on_its_way = staged(numbers.size_bytes());
    std::memcpy(on_its_way, numbers.data(), numbers.size_bytes());
    check(cudaMemcpyAsync(made, on_its_way, numbers.size_bytes(), cudaMemcpyHostToDevice, stream()), "cudaMemcpyAsync");
    return made;
  }
  template <class T>
  T* copy(const std::vector<T>& numbers) {
    return copy(std::span<const T>(numbers));
  }

  /// Waits for all that was queued, and brings numbers back.
  template <class T>
  void fetch(const T* numbers, std::span<T> to) {
    if (!to.empty()) {
      std::byte* on_its_way = staged(to.size_bytes());
      check(cudaMemcpyAsync(on_its_way, numbers, to.size_bytes(), cudaMemcpyDeviceToHost, stream()), "cudaMemcpyAsync");
      backend_.stream_.wait();
      std::memcpy(to.data(), on_its_way, to.size_bytes());
    }
  }
  /// Some number was not finite: kernels set it to 1.
  int* bad() const { return bad_; }
  bool found_bad() {
    int bad = 0;
    fetch(static_cast<const int*>(bad_), std::span(&bad, 1));
    return bad != 0;
  }

 private:
  /// Memory on its way, of its own until the call ends: kept from call to call, for to pin it takes long.
  std::byte* staged(std::size_t bytes) {
    if (backend_.staged_in_use_ == backend_.staged_.size()) backend_.staged_.emplace_back();
    return backend_.staged_[backend_.staged_in_use_++].at_least(bytes);
  }

  CudaBackend& backend_;
  std::deque<DeviceBuffer<std::byte>> blocks_;
  std::size_t staged_before_;
  int* bad_ = nullptr;
};

}  // namespace kvreplay
