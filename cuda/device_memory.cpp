#include "cuda/device_memory.h"

#include <string>

#include "cuda/runtime.h"

namespace kvreplay {
namespace {

// Blocks are whole multiples of this, so that those of one layer fit the next.
constexpr std::size_t granule = 512;

std::string megabytes(std::size_t bytes) { return std::to_string((bytes + (std::size_t{1} << 20) - 1) >> 20) + " MiB"; }

}  // namespace

DeviceMemory::~DeviceMemory() {
  for (const auto& [size, block] : free_) cudaFree(block);
  for (const auto& [block, size] : taken_) cudaFree(block);
}

void* DeviceMemory::take(std::size_t bytes) {
  const std::size_t size = (bytes + granule - 1) / granule * granule;
  const std::lock_guard lock(mutex_);
  // One that is much larger would keep its size from those who need it.
  if (const auto found = free_.lower_bound(size); found != free_.end() && found->first <= size + size / 4) {
    void* block = found->second;
    taken_.emplace(block, found->first);
    free_.erase(found);
    return block;
  }
  const auto return_largest = [&] {
    const auto largest = std::prev(free_.end());
    check(cudaFree(largest->second), "cudaFree");
    allocated_ -= largest->first;
    free_.erase(largest);
  };
  while (!free_.empty() && allocated_ + size > limit_) return_largest();
  const auto refuse = [&](const std::string& why) {
    throw Error{Refusal::resources, "device memory", "out of memory" + why,
                megabytes(size) + " in addition to " + megabytes(allocated_) + " in use",
                "a limit of " + megabytes(limit_)};
  };
  if (allocated_ + size > limit_) refuse("");
  void* block = nullptr;
  cudaError_t status = cudaMalloc(&block, size);
  while (status == cudaErrorMemoryAllocation && !free_.empty()) {
    cudaGetLastError();  // it has been dealt with
    return_largest();
    status = cudaMalloc(&block, size);
  }
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    refuse(", less than the limit is free");
  }
  check(status, "cudaMalloc");
  allocated_ += size;
  taken_.emplace(block, size);
  return block;
}

void DeviceMemory::give_back(void* block) {
  const std::lock_guard lock(mutex_);
  const auto found = taken_.find(block);
  free_.emplace(found->second, block);
  taken_.erase(found);
}

}  // namespace kvreplay
