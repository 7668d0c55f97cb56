// How kernels are started.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "cuda/runtime.h"

namespace kvreplay {

/// Queues a kernel; its arguments are copied.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 blocks, int threads, std::size_t shared_bytes, cudaStream_t stream,
            Arguments&&... arguments) {
  constexpr std::size_t without_asking = std::size_t{48} << 10;
  if (shared_bytes > without_asking) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          "cudaFuncSetAttribute");
  }
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...), "cudaLaunchKernelEx");
}

/// Blocks that cover `count` things, `each` a block.
inline unsigned blocks_for(std::size_t count, std::size_t each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

}  // namespace kvreplay
