#include <cstring>

#include "cuda/compiled.h"
#include "cuda/launch.h"
#include "cuda/ptx.h"
#include "error.h"

namespace kvreplay {
namespace {

__global__ void say_whether_warp_groups(int* answer) { *answer = has_warp_groups() ? 1 : 0; }

}  // namespace

bool compiled_for_warp_groups(DeviceMemory& memory, cudaStream_t stream) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(say_whether_warp_groups));
  if (status != cudaSuccess) {
    cudaGetLastError();
    throw Error{Refusal::capability, "CUDA", "this build has no code for the device",
                "a build with its architecture in CMAKE_CUDA_ARCHITECTURES", cudaGetErrorName(status)};
  }
  DeviceBuffer<int> answer(memory);
  PinnedMemory pinned;
  launch(say_whether_warp_groups, dim3(1), 32, 0, stream, answer.at_least(1));
  std::byte* found = pinned.at_least(sizeof(int));
  check(cudaMemcpyAsync(found, answer.data(), sizeof(int), cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  int number = 0;
  std::memcpy(&number, found, sizeof number);
  return number != 0;
}

}  // namespace kvreplay
