#include "cuda/cuda_backend.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>

#include "cuda/compiled.h"
#include "error.h"

namespace kvreplay {
namespace {

const RegisteredBackend registered{{.name = "cuda",
                                    .summary = "NVIDIA GPUs; exact, the same bits from run to run",
                                    .make = [](int threads, DeviceChoice device) -> std::unique_ptr<Backend> {
                                      return std::make_unique<CudaBackend>(threads, device);
                                    }}};

// Kernels copy to shared memory behind their backs and multiply bfloat16: both came with 8.0.
constexpr int least_major = 8;

/// The device, made current. Whatever it answers but success means that it is not to be had.
cudaDeviceProp choose(int number) {
  const auto refuse = [](cudaError_t status) {
    cudaGetLastError();
    throw Error{Refusal::capability, "CUDA", "no usable device", "",
                std::string(cudaGetErrorName(status)) + ", " + cudaGetErrorString(status)};
  };
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) refuse(status);
  if (number >= count)
    throw Error{Refusal::capability, "CUDA", "no device " + std::to_string(number),
                count == 0 ? "a device" : "0 ... " + std::to_string(count - 1), std::to_string(number)};
  cudaDeviceProp facts{};
  if (const cudaError_t status = cudaGetDeviceProperties(&facts, number); status != cudaSuccess) refuse(status);
  if (facts.major < least_major)
    throw Error{Refusal::capability, "CUDA", "device " + std::to_string(number) + " is not supported",
                "compute capability 8.0 or higher", std::to_string(facts.major) + "." + std::to_string(facts.minor)};
  if (const cudaError_t status = cudaSetDevice(number); status != cudaSuccess) refuse(status);
  std::size_t free = 0, total = 0;  // the first call that needs the device itself
  if (const cudaError_t status = cudaMemGetInfo(&free, &total); status != cudaSuccess) refuse(status);
  return facts;
}

/// Whether 16-bit products are those of warp groups, which Hopper and code compiled for it have.
bool choose_warp_groups(const cudaDeviceProp& facts, bool compiled) {
  const bool there = compiled && facts.major == 9;
  const char* forced = std::getenv("KVREPLAY_CUDA");
  const std::string wanted = forced != nullptr ? forced : there ? "warp-groups" : "warps";
  if (wanted == "warps") return false;
  if (wanted != "warp-groups")
    throw Error{Refusal::usage, "KVREPLAY_CUDA", "unknown value", "warps or warp-groups", wanted};
  if (!there)
    throw Error{
        Refusal::capability, "KVREPLAY_CUDA", "warp-groups are not supported",
        "compute capability 9, and a build for 90a",
        std::to_string(facts.major) + "." + std::to_string(facts.minor) + (compiled ? "" : ", without that code")};
  return true;
}

/// Bytes that may be taken: what was asked for, or nine tenths of what is free.
std::size_t memory_limit(std::size_t asked) {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return asked > 0 ? std::min(asked, free) : free / 10 * 9;
}

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

}  // namespace

CudaBackend::CudaBackend(int threads, DeviceChoice device)
    : threads_(threads > 0 ? threads : omp_get_max_threads()),
      device_(device.number),
      facts_(choose(device.number)),
      memory_(memory_limit(device.memory)),
      tensors_(memory_, threads_, device.number),
      warp_groups_(choose_warp_groups(facts_, compiled_for_warp_groups(memory_, stream_.get()))) {}

std::string CudaBackend::description() const {
  int driver = 0, runtime = 0;
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  return std::string("cuda ") + facts_.name + ", " + std::to_string(facts_.major) + "." + std::to_string(facts_.minor) +
         (warp_groups_ ? " warp-groups" : " warps") + ", driver " + version(driver) + ", runtime " + version(runtime);
}

void CudaBackend::hold(const LayerTensors& layer, bool queries) {
  check(cudaSetDevice(device_), "cudaSetDevice");
  tensors_.hold(layer.k);
  if (queries) tensors_.hold(layer.q);
  tensors_.hold(layer.v);
}

void CudaBackend::let_go(const LayerTensors& layer) {
  for (const TensorView& tensor : {layer.q, layer.k, layer.v}) tensors_.let_go(tensor);
}

std::size_t CudaBackend::working_set(const LayerTensors& layer, const Workload& work) const {
  padded_depth(std::max(layer.k.dim, layer.v.dim));  // throws where no kernel is large enough
  // In the machine's own memory: what is on its way to the device and back.
  const auto tokens = static_cast<std::size_t>(layer.k.tokens);
  const auto heads = static_cast<std::size_t>(layer.q.heads);
  const std::size_t places = tokens * 64;
  const std::size_t sums = 2 * heads * tokens * sizeof(double);
  const std::size_t sets = static_cast<std::size_t>(work.sets + 1) * heads * (tokens / 8 + 64 * sizeof(Moments));
  const std::size_t redundancy = work.redundancy_tokens > 0 ? redundancy_bytes(layer, work.redundancy_tokens) : 0;
  return (std::size_t{64} << 20) + places + sums + sets + redundancy;
}

}  // namespace kvreplay
