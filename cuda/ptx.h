// Instructions of the GPU that C++ has no name for. Everything else in this folder is plain CUDA C++.
//
// Fragment layouts are those of the PTX ISA: of an m16n8 tile a lane holds rows lane / 4 and lane / 4 + 8, and of each
// columns 2 * (lane % 4) and the next.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace kvreplay {

/// The launch's dynamic shared memory, aligned to 1024 bytes.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char kvreplay_shared[];
  return reinterpret_cast<T*>(kvreplay_shared);
}

__device__ __forceinline__ std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

/// 2^x within 2^-22 of it, subnormal results 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 16 bytes from global to shared memory behind the program's back; zeros, and nothing read, if not `valid`.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

/// Copies since the last call are one group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most so many of this thread's groups are under way.
template <int pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/// Four 8x8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(std::uint32_t (&out)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

/// sums[16, 8] += a[16, 16] * b[16, 8], by a warp.
template <class Element>
__device__ __forceinline__ void multiply(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  if constexpr (std::is_same_v<Element, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// Of shared memory written by this thread's copies or stores: what follows on the tensor cores' own path sees it.
__device__ __forceinline__ void fence_async_proxy() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Hopper's products of a warp group, four warps together. Elsewhere they must not be reached.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KVREPLAY_WARP_GROUP(...) asm volatile(__VA_ARGS__)
#else
#define KVREPLAY_WARP_GROUP(...) __trap()
#endif

/// A tile in shared memory whose rows are 128 bytes, 64 numbers side by side that are multiplied with one another, its
/// 16-byte pieces exchanged as the 128-byte swizzle says (piece XOR row % 8). The next 16 numbers: + 2.
__device__ __forceinline__ std::uint64_t matrix_descriptor(const void* shared) {
  constexpr std::uint64_t eight_rows = 1024 >> 4, unused = 1, swizzle_128 = 1;
  const std::uint64_t address = (shared_address(shared) & 0x3FFFF) >> 4;
  return address | unused << 16 | eight_rows << 32 | swizzle_128 << 62;
}

/// Whether what follows is there in the code that is running.
__device__ __forceinline__ bool has_warp_groups() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  return true;
#else
  return false;
#endif
}

/// Nothing that touches the sums moves past this: they are in use until the wait, which does not name them.
template <int blocks>
__device__ __forceinline__ void warpgroup_pin(float (&sums)[blocks][4]) {
#pragma unroll
  for (int i = 0; i < blocks; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(sums[i][j])::"memory");
}

__device__ __forceinline__ void warpgroup_begin() { KVREPLAY_WARP_GROUP("wgmma.fence.sync.aligned;" :: : "memory"); }

__device__ __forceinline__ void warpgroup_commit() {
  KVREPLAY_WARP_GROUP("wgmma.commit_group.sync.aligned;" :: : "memory");
}

/// Waits until at most so many committed groups are under way. Sums must not be read before.
template <int pending>
__device__ __forceinline__ void warpgroup_wait() {
  KVREPLAY_WARP_GROUP("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

#define KVREPLAY_SUMS(i) "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
#define KVREPLAY_MULTIPLY_128(type)                                                                                  \
  KVREPLAY_WARP_GROUP(                                                                                               \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                                   \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                                   \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "  \
      "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "    \
      "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "        \
      "%64, %65, p, 1, 1, 0, 0;\n}\n" : KVREPLAY_SUMS(0),                                                            \
      KVREPLAY_SUMS(1), KVREPLAY_SUMS(2), KVREPLAY_SUMS(3), KVREPLAY_SUMS(4), KVREPLAY_SUMS(5), KVREPLAY_SUMS(6),    \
      KVREPLAY_SUMS(7), KVREPLAY_SUMS(8), KVREPLAY_SUMS(9), KVREPLAY_SUMS(10), KVREPLAY_SUMS(11), KVREPLAY_SUMS(12), \
      KVREPLAY_SUMS(13), KVREPLAY_SUMS(14), KVREPLAY_SUMS(15) : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))

/// sums[64, columns] (+)= a[64, 16] * b[columns, 16]^T, by a warp group: of each eight columns an m16n8 tile a warp.
template <class Element, int columns>
__device__ __forceinline__ void warpgroup_multiply(float (&sums)[columns / 8][4], std::uint64_t a, std::uint64_t b,
                                                   bool accumulate) {
  static_assert(columns == 128);
  if constexpr (std::is_same_v<Element, __half>) {
    KVREPLAY_MULTIPLY_128("f16");
  } else {
    KVREPLAY_MULTIPLY_128("bf16");
  }
}

#undef KVREPLAY_MULTIPLY_128
#undef KVREPLAY_SUMS
#undef KVREPLAY_WARP_GROUP

}  // namespace kvreplay
