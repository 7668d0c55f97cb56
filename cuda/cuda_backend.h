// The backend for NVIDIA GPUs, compute capability 8.0 or later: every call's O(n²) work on the device, within a limit
// of its memory, the same bits from run to run.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "attention/softmax_keys.h"
#include "cuda/attention_task.h"
#include "cuda/device_memory.h"
#include "cuda/device_tensors.h"
#include "cuda/runtime.h"

namespace kvreplay {

class CudaBackend final : public Backend {
 public:
  /// Throws Error{capability} with the driver's reason where there is no such device. The environment variable
  /// KVREPLAY_CUDA forces "warps" or "warp-groups", the two ways to multiply 16-bit numbers (tiles.h); by default the
  /// second, where the device has it.
  CudaBackend(int threads, DeviceChoice device);

  std::string description() const override;
  int threads() const override { return threads_; }
  Matrix attention_sums(const LayerTensors& layer, const AttentionSums& what) override;
  KeptMoments kept_moments(const LayerTensors& layer, std::span<const std::int32_t> queries, int boundary,
                           std::span<const KeptSets> kept, MomentParts parts) override;
  std::vector<ComparedSet> compare_sets(const LayerTensors& layer, std::span<const ChangedSet> sets,
                                        std::span<const std::int32_t> queries, int boundary, bool vectors) override;
  std::vector<std::int32_t> online_eviction(const LayerTensors& layer, const OnlineEviction& what) override;
  std::vector<std::int32_t> least_redundant(const LayerTensors& layer, const RedundancyElimination& what) override;
  Matrix norms(const TensorView& tensor, int tokens, double p) override;
  std::vector<double> similarity_row_maxima(const TensorView& tensor, int tokens) override;
  void hold(const LayerTensors& layer, bool queries) override;
  void let_go(const LayerTensors& layer) override;
  std::size_t working_set(const LayerTensors& layer, const Workload& work) const override;

 private:
  friend class DeviceCall;

  ComparedSet compare_set(const LayerTensors& layer, const ChangedSet& set, std::span<const std::int32_t> queries,
                          int boundary, bool vectors);
  /// Query by query, because each reads other values.
  ComparedSet compare_evolving_set(const LayerTensors& layer, const ChangedSet& set,
                                   std::span<const std::int32_t> queries, int boundary, bool vectors);

  /// Whether least_redundant runs on the device; what it then needs of the machine's own memory.
  bool redundancy_fits(const LayerTensors& layer, int tokens, bool keys, bool values) const;
  std::size_t redundancy_bytes(const LayerTensors& layer, int tokens) const;

  int threads_;
  int device_;
  cudaDeviceProp facts_;
  DeviceMemory memory_;
  DeviceTensors tensors_;
  Stream stream_;
  std::deque<PinnedMemory> staged_;
  std::size_t staged_in_use_ = 0;
  PinnedMemory kept_sets_;
  bool warp_groups_;
};

}  // namespace kvreplay
