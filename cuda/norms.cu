// Norms of vectors, in float64: a warp a row.
#include <algorithm>
#include <cmath>

#include "cuda/device_call.h"
#include "cuda/launch.h"
#include "cuda/stored_types.h"
#include "cuda/tiles.h"
#include "cuda/widened.h"
#include "error.h"

namespace kvreplay {
namespace {

constexpr int block_threads = 256;

/// norms[token] = (Σ |x|^p)^(1/p) of a matrix's row; zeros that fill it up change nothing.
template <class Element>
__global__ void row_norms(const Element* matrix, int depth, int tokens, double p, double* norms, int* bad) {
  const auto token = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  if (token >= tokens) return;  // all lanes of a warp
  const Element* row = matrix + static_cast<std::size_t>(token) * static_cast<std::size_t>(depth);
  double sum = 0.0;
  double highest = 0.0;
  for (int c = lane(); c < depth; c += 32) {
    const double x = fabs(static_cast<double>(widened(row[c])));
    sum += p == 2.0 ? x * x : p == 1.0 || p == INFINITY ? x : pow(x, p);
    highest = fmax(highest, x);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0U, sum, distance);
    highest = fmax(highest, __shfl_xor_sync(~0U, highest, distance));
  }
  if (lane() != 0) return;
  double norm = p == 2.0 ? sqrt(sum) : p == 1.0 ? sum : pow(sum, 1.0 / p);
  // A maximum may lose what is not a number; a sum does not.
  if (p == INFINITY) norm = sum < INFINITY ? highest : sum;
  if (!(norm < INFINITY)) *bad = 1;
  norms[token] = norm;
}

}  // namespace

Matrix CudaBackend::norms(const TensorView& tensor, int tokens, double p) {
  Matrix norms(tensor.heads, tokens);
  if (norms.values().empty()) return norms;
  DeviceCall call(*this);
  const auto row = static_cast<std::size_t>(tokens);
  int at_once = tensor.heads;
  if (!tensors_.holds(tensor)) {
    const std::size_t of_head = DeviceTensors::head_bytes(tensor) + row * sizeof(double);
    at_once = static_cast<int>(
        std::clamp<std::size_t>(memory_.limit() / 4 / of_head, 1, static_cast<std::size_t>(tensor.heads)));
  }
  double* made = call.room<double>(static_cast<std::size_t>(at_once) * row);
  for (int first = 0; first < tensor.heads; first += at_once) {
    const int count = std::min(at_once, tensor.heads - first);
    const DeviceTensors::Lease lease = tensors_.lease(tensor, first, count, {}, call.stream());
    with_element(tensor.dtype, [&]<class Element>() {
      for (int head = 0; head < count; ++head)
        launch(row_norms<Element>, dim3(blocks_for(row * 32, block_threads)), block_threads, 0, call.stream(),
               static_cast<const Element*>(lease.heads()[static_cast<std::size_t>(head)]), padded_depth(tensor.dim),
               tokens, p, made + static_cast<std::size_t>(head) * row, call.bad());
    });
    call.fetch(static_cast<const double*>(made),
               norms.values().subspan(static_cast<std::size_t>(first) * row, static_cast<std::size_t>(count) * row));
  }
  if (call.found_bad()) throw Error{Refusal::input, "norms", "vectors", "finite numbers", "NaN or Inf"};
  return norms;
}

}  // namespace kvreplay
