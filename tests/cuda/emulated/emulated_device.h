#pragma once

// What tests ask of the emulated device, and what they may do to it.

#include <cstddef>
#include <cstdint>

// In the numbers of the CUDA runtime.
enum cudaError : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInitializationError = 3,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidPitchValue = 12,
  cudaErrorInvalidMemcpyDirection = 21,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorECCUncorrectable = 214,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchTimeout = 702,
  cudaErrorAssert = 710,
  cudaErrorHardwareStackError = 714,
  cudaErrorIllegalInstruction = 715,
  cudaErrorMisalignedAddress = 716,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotPermitted = 800,
  cudaErrorNotSupported = 801,
  cudaErrorUnknown = 999,
};

namespace emulated {

/// In which order warps and lanes that can go on do so, blocks run, and streams that nobody waits for get ahead of the
/// one that is waited for: not at all, all of them, or some. Right programs give the same results in every order.
struct Order {
  enum class Kind { forward, backward, shuffled };
  Kind kind = Kind::forward;
  std::uint64_t seed = 0;
};
inline constexpr Order forward{Order::Kind::forward};
inline constexpr Order backward{Order::Kind::backward};
constexpr Order shuffled(std::uint64_t seed) { return {Order::Kind::shuffled, seed}; }

/// The default is that of the environment variable KVREPLAY_EMULATED_ORDER (forward, backward or a seed), else forward.
void set_order(Order order);

/// Bytes of device memory in all; 1 GiB by default.
void set_memory(std::size_t bytes);

/// The compute capability, 9.0 by default; shared memory per block is that of the real device.
void set_capability(int major, int minor);

/// From now on every call that asks for the device returns [error], as without a driver; cudaSuccess ends that.
void set_device_count_error(cudaError error);

/// The [n]-th runtime call from now (1 is the next one) returns [error] and does nothing else. An error of kernels
/// (illegal addresses, failed launches) at a call that only queues work comes out at the next synchronisation instead,
/// and stays.
void fail_call(int n, cudaError error);

/// How many runtime calls there were since the last reset: what fail_call counts.
int calls();

/// Device memory now, and the most there was since the last reset.
std::size_t allocated();
std::size_t peak_allocated();

/// Pinned host memory now.
std::size_t host_allocated();

/// Streams and events that were made and not destroyed.
int handles();

/// As a new process finds the device, but that what cudaFuncSetAttribute said about kernels stays. Streams, events and
/// memory are gone; work that was queued is dropped.
void reset();

}  // namespace emulated
