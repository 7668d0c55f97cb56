// The backend for CPUs: SIMD tiles (tile.h) under OpenMP. Work is cut into pieces that do not depend on the number of
// threads, each piece has its own sums, and these are added in order.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "cpu/aligned_buffer.h"
#include "cpu/comparison_kernels.h"
#include "cpu/online_kernels.h"
#include "cpu/simd_level.h"
#include "cpu/similarity_kernels.h"
#include "cpu/thread_scratch.h"
#include "cpu/tile.h"

namespace kvreplay {

class CpuBackend final : public Backend {
 public:
  /// least_redundant holds so many bytes of similarities; beyond them it computes rows as it needs them.
  explicit CpuBackend(int threads, std::size_t similarity_bytes = std::size_t{1} << 30);

  std::string description() const override;
  int threads() const override { return threads_; }
  Matrix attention_sums(const LayerTensors& layer, const AttentionSums& what) override;
  std::vector<Matrix> attention_rows(const LayerTensors& layer, const AttentionRows& what) override;
  KeptMoments kept_moments(const LayerTensors& layer, std::span<const std::int32_t> queries, int boundary,
                           std::span<const KeptSets> kept, MomentParts parts) override;
  std::vector<ComparedSet> compare_sets(const LayerTensors& layer, std::span<const ChangedSet> sets,
                                        std::span<const std::int32_t> queries, int boundary, bool vectors) override;
  std::vector<std::int32_t> online_eviction(const LayerTensors& layer, const OnlineEviction& what) override;
  std::vector<std::vector<std::int32_t>> online_evictions(const LayerTensors& layer,
                                                          std::span<const OnlineEviction> all) override;
  std::vector<std::int32_t> least_redundant(const LayerTensors& layer, const RedundancyElimination& what) override;
  Matrix norms(const TensorView& tensor, int tokens, double p) override;
  std::vector<double> similarity_row_maxima(const TensorView& tensor, int tokens) override;
  std::size_t working_set(const LayerTensors& layer, const Workload& work) const override;

 private:
  std::size_t redundancy_bytes(const LayerTensors& layer, int tokens) const;

  ThreadScratch& scratch();

  const SimdLevel level_;
  const TileKernels& kernels_;
  const SimilarityKernels& similarity_kernels_;
  const OnlineKernels& online_kernels_;
  const ComparisonKernels& comparison_kernels_;
  int threads_;
  std::size_t similarity_bytes_;
  std::vector<ThreadScratch> scratch_;
  AlignedBuffer<float> packed_keys_;
  AlignedBuffer<double> partial_sums_;
  /// Between calls of least_redundant: vectors, and all of their similarities. Without tokens nothing is held.
  struct HeldSimilarities {
    int tokens = 0;
    int dim = 0;
    bool of_floats = true;
    bool operator==(const HeldSimilarities&) const = default;
  };
  HeldSimilarities held_similarities_[2];  // of keys and of values
  AlignedBuffer<double> wide_vectors_[2];
  AlignedBuffer<std::int32_t> similarities_[2];
};

}  // namespace kvreplay
