#include "cuda/device_tensors.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "error.h"

namespace kvreplay {
namespace {

constexpr std::size_t stage_bytes = std::size_t{16} << 20;
// A smaller copy is not worth waking threads for.
constexpr std::size_t bytes_a_thread = std::size_t{1} << 20;

std::size_t padded_row_bytes(const TensorView& tensor) {
  return static_cast<std::size_t>(padded_depth(tensor.dim)) * size_of(tensor.dtype);
}

}  // namespace

int padded_depth(int dim) {
  for (const int depth : {64, 128, 256})
    if (dim <= depth) return depth;
  throw Error{Refusal::capability, "head_dim", "not supported by the CUDA backend", "at most 256, or --device cpu",
              std::to_string(dim)};
}

DeviceTensors::DeviceTensors(DeviceMemory& memory, int threads, int device)
    : memory_(memory),
      threads_(threads),
      staging_(std::make_unique<Stage[]>(stages)),
      worker_([this, device] { bring_held(device); }) {}

DeviceTensors::~DeviceTensors() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  worker_.join();
  cudaStreamSynchronize(copies_.get());
}

std::size_t DeviceTensors::head_bytes(const TensorView& tensor) {
  return static_cast<std::size_t>(tensor.tokens) * padded_row_bytes(tensor);
}

void DeviceTensors::hold(const TensorView& tensor) {
  const std::lock_guard lock(mutex_);
  if (held_.contains(tensor.data)) return;
  const std::size_t bytes = head_bytes(tensor) * static_cast<std::size_t>(tensor.heads);
  // The other half is for what calls work in.
  std::size_t in_use = bytes;
  for (const auto& [data, held] : held_)
    in_use += head_bytes(held->tensor) * static_cast<std::size_t>(held->tensor.heads);
  if (in_use > memory_.limit() / 2) return;
  auto held = std::make_shared<Held>(Held{.tensor = tensor, .block = DeviceBuffer<std::byte>(memory_), .ready = {}});
  try {
    held->block.at_least(bytes);
  } catch (const Error& error) {
    if (error.refusal() != Refusal::resources) throw;
    return;
  }
  held->ready.resize(static_cast<std::size_t>(tensor.heads));
  held_.emplace(tensor.data, held);
  to_bring_.push_back(held);
  changed_.notify_all();
}

void DeviceTensors::let_go(const TensorView& tensor) {
  std::unique_lock lock(mutex_);
  const auto found = held_.find(tensor.data);
  if (found == held_.end()) return;
  const std::shared_ptr<Held> held = std::move(found->second);
  held_.erase(found);
  // The worker may be reading the tensor.
  const bool waits = std::erase(to_bring_, held) > 0;
  if (waits) return;
  changed_.wait(lock, [&] { return held->queued == held->tensor.heads || failure_; });
  lock.unlock();
  cudaStreamSynchronize(copies_.get());  // an error is the next call's: this one may be cleaning up after it
}

bool DeviceTensors::holds(const TensorView& tensor) {
  const std::lock_guard lock(mutex_);
  return find(tensor).held != nullptr;
}

DeviceTensors::Found DeviceTensors::find(const TensorView& tensor) const {
  const auto after = held_.upper_bound(tensor.data);
  if (after == held_.begin()) return {};
  const std::shared_ptr<Held>& held = std::prev(after)->second;
  const TensorView& whole = held->tensor;
  if (tensor.dtype != whole.dtype || tensor.tokens != whole.tokens || tensor.dim != whole.dim) return {};
  for (int first = 0; first + tensor.heads <= whole.heads; ++first)
    if (tensor.data == whole.row(first, 0)) return {held, first};
  return {};
}

void DeviceTensors::bring_held(int device) {
  const cudaError_t chosen = cudaSetDevice(device);
  std::unique_lock lock(mutex_);
  if (chosen != cudaSuccess) failure_ = std::make_exception_ptr(Error{Refusal::internal, "CUDA", "cudaSetDevice"});
  changed_.notify_all();
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !to_bring_.empty(); });
    if (stopping_) return;
    const std::shared_ptr<Held> held = to_bring_.front();
    to_bring_.pop_front();
    for (int head = 0; head < held->tensor.heads && !failure_; ++head) {
      lock.unlock();
      std::exception_ptr failure;
      try {
        upload(held->tensor, head, {}, held->block.data() + static_cast<std::size_t>(head) * head_bytes(held->tensor));
        held->ready[static_cast<std::size_t>(head)].record(copies_.get());
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      if (failure) failure_ = failure;
      held->queued = head + 1;
      changed_.notify_all();
    }
  }
}

void DeviceTensors::upload(const TensorView& tensor, int head, std::span<const std::int32_t> rows, std::byte* to) {
  const std::size_t row_bytes = tensor.row_bytes();
  const std::size_t padded_bytes = padded_row_bytes(tensor);
  const int count = rows.empty() ? tensor.tokens : static_cast<int>(rows.size());
  const int rows_at_once = static_cast<int>(stage_bytes / padded_bytes);
  const std::lock_guard lock(staging_mutex_);
  for (int first = 0; first < count; first += rows_at_once) {
    const int some = std::min(rows_at_once, count - first);
    const std::size_t bytes = static_cast<std::size_t>(some) * padded_bytes;
    Stage& stage = staging_[static_cast<std::size_t>(next_stage_)];
    next_stage_ = (next_stage_ + 1) % stages;
    std::byte* staged = stage.memory.at_least(stage_bytes);
    stage.copied.wait();
    const int workers =
        static_cast<int>(std::clamp(bytes / bytes_a_thread, std::size_t{1}, static_cast<std::size_t>(threads_)));
    const bool as_it_lies = rows.empty() && padded_bytes == row_bytes && tensor.is_contiguous();
    const int rows_a_copy = as_it_lies ? (some + workers - 1) / workers : 1;
#pragma omp parallel for schedule(static) num_threads(workers)
    for (int i = 0; i < some; i += rows_a_copy) {
      const int row = rows.empty() ? first + i : rows[static_cast<std::size_t>(first + i)];
      std::byte* into = staged + static_cast<std::size_t>(i) * padded_bytes;
      std::memcpy(into, tensor.row(head, row), row_bytes * static_cast<std::size_t>(std::min(rows_a_copy, some - i)));
      if (!as_it_lies) std::memset(into + row_bytes, 0, padded_bytes - row_bytes);
    }
    check(cudaMemcpyAsync(to + static_cast<std::size_t>(first) * padded_bytes, staged, bytes, cudaMemcpyHostToDevice,
                          copies_.get()),
          "cudaMemcpyAsync");
    stage.copied.record(copies_.get());
  }
}

DeviceTensors::Lease DeviceTensors::lease(const TensorView& tensor, int first, int heads,
                                          std::span<const std::int32_t> rows, cudaStream_t stream) {
  Lease lease;
  lease.copies_ = copies_.get();
  std::shared_ptr<Held> held;
  if (rows.empty()) {
    std::unique_lock lock(mutex_);
    const Found found = find(tensor);
    held = found.held;
    if (held) {
      first += found.first;
      changed_.wait(lock, [&] { return held->queued >= first + heads || failure_; });
      if (failure_) std::rethrow_exception(failure_);
    }
  }
  const std::size_t bytes = rows.empty() ? head_bytes(tensor) : rows.size() * padded_row_bytes(tensor);
  for (int head = first; head < first + heads; ++head) {
    if (held) {
      held->ready[static_cast<std::size_t>(head)].hold_back(stream);
      lease.heads_.push_back(held->block.data() + static_cast<std::size_t>(head) * bytes);
      continue;
    }
    std::byte* block = lease.blocks_.emplace_back(memory_).at_least(bytes);
    upload(tensor, head, rows, block);
    lease.heads_.push_back(block);
  }
  if (!held) {
    Event ready;
    ready.record(copies_.get());
    ready.hold_back(stream);
  }
  return lease;
}

}  // namespace kvreplay
