// Tensors of a trace on the device, head by head: a matrix [tokens, depth] in the type in which they are stored.
//
// Layers that are held come in the background, through pinned memory on a stream of their own, while another layer is
// being worked on. Everything else comes when it is asked for and goes with the lease.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/device_memory.h"
#include "cuda/runtime.h"
#include "tensor.h"

namespace kvreplay {

/// Numbers of a row on the device: those of the vector, and zeros up to a size that kernels are made for. Throws
/// Error{capability} beyond 256.
int padded_depth(int dim);

class DeviceTensors {
 public:
  /// `threads` fill pinned memory; `device` is the number of the one that `memory` is of.
  DeviceTensors(DeviceMemory& memory, int threads, int device);
  ~DeviceTensors();
  DeviceTensors(const DeviceTensors&) = delete;
  DeviceTensors& operator=(const DeviceTensors&) = delete;

  /// Brings a tensor, whose numbers stay as they are until it is let go, unless it does not fit.
  void hold(const TensorView& tensor);
  void let_go(const TensorView& tensor);
  /// A tensor or some heads of one.
  bool holds(const TensorView& tensor);

  /// Some heads of a tensor for as long as this lives.
  class Lease {
   public:
    Lease() = default;
    ~Lease() {
      if (!blocks_.empty()) cudaStreamSynchronize(copies_);  // also when an error ends the call early
    }
    Lease(Lease&&) = default;
    Lease& operator=(Lease&&) = default;

    /// Of each head; rows are in the order of the tensor, or of the rows that were asked for.
    std::span<const void* const> heads() const { return heads_; }

   private:
    friend class DeviceTensors;
    std::vector<const void*> heads_;
    std::vector<DeviceBuffer<std::byte>> blocks_;
    cudaStream_t copies_ = nullptr;
  };
  /// Heads [first, first + heads); work queued on `stream` from now on finds them. `rows`: only those; empty: all.
  Lease lease(const TensorView& tensor, int first, int heads, std::span<const std::int32_t> rows, cudaStream_t stream);

  /// Bytes of one head on the device.
  static std::size_t head_bytes(const TensorView& tensor);

 private:
  struct Held {
    TensorView tensor;
    DeviceBuffer<std::byte> block;
    std::vector<Event> ready;  // of each head
    int queued = 0;            // heads whose copies are on their way
  };

  /// What is held of the numbers of a tensor, which may be some heads of one that is held, from the first of them on.
  /// The mutex is locked.
  struct Found {
    std::shared_ptr<Held> held;  // null: it is not
    int first = 0;
  };
  Found find(const TensorView& tensor) const;

  void bring_held(int device);
  void upload(const TensorView& tensor, int head, std::span<const std::int32_t> rows, std::byte* to);

  DeviceMemory& memory_;
  int threads_;
  Stream copies_;

  std::mutex staging_mutex_;
  static constexpr int stages = 3;
  struct Stage {
    PinnedMemory memory;
    Event copied;
  };
  std::unique_ptr<Stage[]> staging_;
  int next_stage_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<const std::byte*, std::shared_ptr<Held>> held_;
  std::deque<std::shared_ptr<Held>> to_bring_;
  std::exception_ptr failure_;
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace kvreplay
