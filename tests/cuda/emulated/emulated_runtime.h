#pragma once

// The part of CUDA's language and runtime that kvreplay uses, for an emulated device. Signatures, enumerators and their
// values are those of CUDA 13.

#include <math.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "emulated_block.h"
#include "emulated_device.h"
#include "vector_types.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))

// The language: barriers and exchanges.

namespace emulated {

using Where = std::source_location;

template <class Value>
struct Shuffle {
  Value value;
  unsigned source;
  Value result;

  static void carry_out(const std::array<void*, 32>& arguments, std::uint32_t mask) {
    for (std::uint32_t rest = mask; rest; rest &= rest - 1) {
      auto& shuffle = *static_cast<Shuffle*>(arguments[static_cast<unsigned>(std::countr_zero(rest))]);
      if (!(mask >> shuffle.source & 1u)) throw Failure("a shuffle reads from a lane that is not in the mask");
      shuffle.result = static_cast<const Shuffle*>(arguments[shuffle.source])->value;
    }
  }
};

template <class Value>
Value shuffle(std::uint32_t mask, Value value, unsigned source, int width, const Place& place) {
  static_assert(std::is_arithmetic_v<Value> && (sizeof(Value) == 4 || sizeof(Value) == 8));
  if (width != 32) throw Failure("shuffles of parts of a warp are not emulated");
  Shuffle<Value> shuffle{value, source, value};
  exchange(&Shuffle<Value>::carry_out, &shuffle, mask, place);
  return shuffle.result;
}

struct Ballot {
  bool predicate;
  unsigned result;

  static void carry_out(const std::array<void*, 32>& arguments, std::uint32_t mask) {
    unsigned votes = 0;
    for (unsigned l = 0; l < 32; ++l) {
      if (mask >> l & 1u) votes |= static_cast<unsigned>(static_cast<const Ballot*>(arguments[l])->predicate) << l;
    }
    for (unsigned l = 0; l < 32; ++l) {
      if (mask >> l & 1u) static_cast<Ballot*>(arguments[l])->result = votes;
    }
  }
};

inline unsigned ballot(std::uint32_t mask, int predicate, const Place& place) {
  Ballot ballot{predicate != 0, 0};
  exchange(&Ballot::carry_out, &ballot, mask, place);
  return ballot.result;
}

inline void meet(const std::array<void*, 32>&, std::uint32_t) {}

}  // namespace emulated

inline void __syncthreads(emulated::Where where = emulated::Where::current()) {
  emulated::block_barrier({"__syncthreads", where});
}

inline void __syncwarp(unsigned mask = ~0u, emulated::Where where = emulated::Where::current()) {
  emulated::exchange(&emulated::meet, nullptr, mask, {"__syncwarp", where});
}

template <class Value>
Value __shfl_sync(unsigned mask, Value value, int source, int width = 32,
                  emulated::Where where = emulated::Where::current()) {
  return emulated::shuffle(mask, value, static_cast<unsigned>(source) % 32, width, {"__shfl_sync", where});
}

template <class Value>
Value __shfl_xor_sync(unsigned mask, Value value, int lanes, int width = 32,
                      emulated::Where where = emulated::Where::current()) {
  return emulated::shuffle(mask, value, (emulated::lane() ^ static_cast<unsigned>(lanes)) % 32, width,
                           {"__shfl_xor_sync", where});
}

template <class Value>
Value __shfl_down_sync(unsigned mask, Value value, unsigned lanes, int width = 32,
                       emulated::Where where = emulated::Where::current()) {
  const unsigned source = emulated::lane() + lanes;
  return emulated::shuffle(mask, value, source < 32 ? source : emulated::lane(), width, {"__shfl_down_sync", where});
}

template <class Value>
Value __shfl_up_sync(unsigned mask, Value value, unsigned lanes, int width = 32,
                     emulated::Where where = emulated::Where::current()) {
  const unsigned own = emulated::lane();
  return emulated::shuffle(mask, value, lanes <= own ? own - lanes : own, width, {"__shfl_up_sync", where});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, emulated::Where where = emulated::Where::current()) {
  return emulated::ballot(mask, predicate, {"__ballot_sync", where});
}

inline int __any_sync(unsigned mask, int predicate, emulated::Where where = emulated::Where::current()) {
  return emulated::ballot(mask, predicate, {"__any_sync", where}) != 0;
}

inline int __all_sync(unsigned mask, int predicate, emulated::Where where = emulated::Where::current()) {
  return emulated::ballot(mask, !predicate, {"__all_sync", where}) == 0;
}

// The language: arithmetic.

inline int __popc(unsigned value) { return std::popcount(value); }
inline int __popcll(unsigned long long value) { return std::popcount(value); }
inline int __clz(int value) { return std::countl_zero(static_cast<unsigned>(value)); }
inline int __clzll(long long value) { return std::countl_zero(static_cast<unsigned long long>(value)); }
inline int __ffs(int value) { return value ? std::countr_zero(static_cast<unsigned>(value)) + 1 : 0; }
inline int __ffsll(long long value) { return value ? std::countr_zero(static_cast<unsigned long long>(value)) + 1 : 0; }

template <class Value>
Value __ldg(const Value* address) {
  return *address;
}

inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return ::fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __fma_rn(double x, double y, double z) { return ::fma(x, y, z); }

inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }

namespace emulated {

/// To the nearest integer, ties to even; what is out of range becomes the nearest that there is, NaN [of_nan], as PTX's
/// cvt says.
template <class Integer, class Value>
Integer to_integer(Value value, Integer of_nan) {
  if (value != value) return of_nan;
  const Value limit = -static_cast<Value>(std::numeric_limits<Integer>::min());
  const Value rounded = std::nearbyint(value);
  if (rounded >= limit) return std::numeric_limits<Integer>::max();
  if (rounded < -limit) return std::numeric_limits<Integer>::min();
  return static_cast<Integer>(rounded);
}

}  // namespace emulated

inline int __float2int_rn(float value) { return emulated::to_integer<int>(value, 0); }
inline int __double2int_rn(double value) { return emulated::to_integer<int>(value, std::numeric_limits<int>::min()); }
inline long long __double2ll_rn(double value) {
  return emulated::to_integer<long long>(value, std::numeric_limits<long long>::min());
}

inline float rsqrtf(float value) { return 1.0f / ::sqrtf(value); }

#define KVREPLAY_MIN_MAX(Type)                              \
  inline Type min(Type a, Type b) { return b < a ? b : a; } \
  inline Type max(Type a, Type b) { return a < b ? b : a; }
KVREPLAY_MIN_MAX(int)
KVREPLAY_MIN_MAX(unsigned)
KVREPLAY_MIN_MAX(long)
KVREPLAY_MIN_MAX(unsigned long)
KVREPLAY_MIN_MAX(long long)
KVREPLAY_MIN_MAX(unsigned long long)
#undef KVREPLAY_MIN_MAX
// Of a number and NaN they give the number.
inline float min(float a, float b) { return ::fminf(a, b); }
inline float max(float a, float b) { return ::fmaxf(a, b); }
inline double min(double a, double b) { return ::fmin(a, b); }
inline double max(double a, double b) { return ::fmax(a, b); }

// The runtime.

using cudaError_t = cudaError;

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

inline constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
inline constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;
inline constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2,
                          cudaHostAllocWriteCombined = 4;

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaHostFn_t = void (*)(void*);

struct cudaDeviceProp {
  char name[256];
  std::size_t totalGlobalMem;
  int major, minor;
  int multiProcessorCount;
  int pciBusID, pciDeviceID, pciDomainID;
  int l2CacheSize;
  std::size_t sharedMemPerMultiprocessor;
  std::size_t sharedMemPerBlockOptin;
};

struct cudaLaunchAttribute;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaDeviceSynchronize();

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total);
cudaError_t cudaMalloc(void** memory, std::size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMallocHost(void** memory, std::size_t bytes, unsigned flags = 0);
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2DAsync(void* target, std::size_t target_pitch, const void* source, std::size_t source_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream = nullptr);
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream = nullptr);

template <class T>
cudaError_t cudaMalloc(T** memory, std::size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(memory), bytes);
}
template <class T>
cudaError_t cudaMallocHost(T** memory, std::size_t bytes, unsigned flags = 0) {
  return cudaMallocHost(reinterpret_cast<void**>(memory), bytes, flags);
}
template <class T>
cudaError_t cudaHostAlloc(T** memory, std::size_t bytes, unsigned flags) {
  return cudaHostAlloc(reinterpret_cast<void**>(memory), bytes, flags);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument);

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
struct cudaFuncAttributes {
  int maxThreadsPerBlock;
};
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
template <class T>
cudaError_t cudaFuncSetAttribute(T* kernel, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

namespace emulated {
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> thread);
}

/// The arguments are converted to the kernel's parameters and copied by this call.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  static_assert((std::is_trivially_copyable_v<Parameters> && ...), "a device copies a kernel's parameters as bytes");
  return [&](Parameters... values) {
    return emulated::launch(*config, reinterpret_cast<const void*>(kernel), [kernel, values...] { kernel(values...); });
  }(std::forward<Arguments>(arguments)...);
}
