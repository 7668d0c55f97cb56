#include "cpu/cpu_backend.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "error.h"
#include "forked_threads.h"

namespace kvreplay {
namespace {

const RegisteredBackend registered{
    {.name = "cpu",
     .summary = "SIMD tiles on all cores; exact, the same bits for any number of threads",
     .make = [](int threads, DeviceChoice) -> std::unique_ptr<Backend> {
       return std::make_unique<CpuBackend>(threads);
     }}};

/// What the caller asks for; 0: all cores.
int allowed(int threads) {
  if (!has_lost_threads()) return threads > 0 ? threads : omp_get_max_threads();
  if (threads > 1)
    throw Error{Refusal::capability, "--threads", "a forked process cannot start more threads",
                "threads=1, or multiprocessing with the spawn method", std::to_string(threads)};
  return 1;
}

/// As many of `wanted` threads as the system lets this process have. OpenMP ends the program where it is refused one:
/// it has its threads from here on.
int granted(int wanted) {
  int threads = 1;
  {
    std::vector<std::jthread> others;
    std::mutex counting;
    const std::lock_guard all_at_once(counting);
    try {
      for (; threads < wanted; ++threads) others.emplace_back([&counting] { const std::lock_guard counted(counting); });
    } catch (const std::system_error&) {
      // No more.
    }
  }
  if (threads > 1) note_threads_begin();
#pragma omp parallel num_threads(threads)
  omp_get_thread_num();
  return threads;
}

}  // namespace

CpuBackend::CpuBackend(int threads, std::size_t similarity_bytes)
    : level_(choose_simd_level()),
      kernels_(tile_kernels()),
      similarity_kernels_(similarity_kernels()),
      online_kernels_(online_kernels()),
      comparison_kernels_(comparison_kernels()),
      threads_(granted(allowed(threads))),
      similarity_bytes_(similarity_bytes) {
  scratch_.reserve(static_cast<std::size_t>(threads_));
  for (int thread = 0; thread < threads_; ++thread) scratch_.emplace_back(kernels_, moment_kernels());
}

std::string CpuBackend::description() const { return "cpu " + level_.name; }

ThreadScratch& CpuBackend::scratch() { return scratch_[static_cast<std::size_t>(omp_get_thread_num())]; }

Matrix CpuBackend::norms(const TensorView& tensor, int tokens, double p) {
  Matrix norms(tensor.heads, tokens);
  std::atomic<bool> finite{true};
#pragma omp parallel num_threads(threads_)
  {
    float* vector = scratch().staging.at_least(static_cast<std::size_t>(tensor.dim));
#pragma omp for collapse(2) schedule(static)
    for (int head = 0; head < tensor.heads; ++head) {
      for (int token = 0; token < tokens; ++token) {
        kernels_.widen(tensor.row(head, token), tensor.dtype, tensor.dim, vector);
        norms(head, token) = similarity_kernels_.norm(vector, tensor.dim, p);
        if (!std::isfinite(norms(head, token))) finite = false;
      }
    }
  }
  if (!finite) throw Error{Refusal::input, "norms", "vectors", "finite numbers", "NaN or Inf"};
  return norms;
}

std::size_t CpuBackend::working_set(const LayerTensors& layer, const Workload& work) const {
  const auto tokens = static_cast<std::size_t>(layer.k.tokens);
  const auto threads = static_cast<std::size_t>(threads_);
  const auto dim = static_cast<std::size_t>(layer.k.dim);
  // Buffers stay from call to call, so they add up: packed keys of one KV head (of similarity, 16 MiB); column sums of
  // 32 segments and the heads they meet, or of all query heads; and for each thread 128 rows of exponentials or 32 MiB
  // of them, and of kept moments 48 rows of exponentials and logits, masks and sums of every set, and its weighted
  // values below the boundary and from there on.
  const std::size_t keys = std::max(tokens * dim * sizeof(float), std::size_t{16} << 20);
  const int sums = std::max(32 + layer.group(), layer.q.heads + layer.k.heads);
  const std::size_t columns = tokens * sizeof(double) * static_cast<std::size_t>(sums);
  const std::size_t row = tokens * sizeof(float);
  const std::size_t exponentials = std::max(std::min(128 * row, std::size_t{32} << 20), 48 * row);
  const std::size_t rows = threads * (exponentials + (work.parts.logits ? 48 : 0) * row);
  const std::size_t value_bytes = work.parts.outputs ? 2 * (dim + 32) * sizeof(double) : 0;
  const std::size_t values = threads * 48 * static_cast<std::size_t>(work.sets + 1) * (256 + value_bytes);
  // The general comparison has some 48 rows of logits and two softmaxes in float64 a thread, and the sines and cosines
  // of all distances, of which two tables are kept.
  const auto group = static_cast<std::size_t>(layer.group());
  const std::size_t comparison = threads * std::max(group, std::size_t{48}) * tokens * 3 * sizeof(double) +
                                 tokens * layer.rope.inv_freq.size() * 4 * sizeof(double);
  // Online eviction takes the keys that some rows hold, for each KV head 24 rows of exponentials over them, their
  // positions and their scores. A thread has the KV heads of one row. It keeps nothing.
  const std::size_t slot_bytes = (dim + std::max(group, std::size_t{24})) * sizeof(float) + 16;
  const std::size_t held = threads * static_cast<std::size_t>(work.online_heads) * tokens * slot_bytes;
  const std::size_t redundancy = work.redundancy_tokens > 0 ? redundancy_bytes(layer, work.redundancy_tokens) : 0;
  return keys + columns + rows + values + redundancy + (work.comparisons ? comparison : 0) + held;
}

}  // namespace kvreplay
