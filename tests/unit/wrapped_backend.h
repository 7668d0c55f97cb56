// The CPU's numbers, for tests that change some of its answers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/backend.h"

namespace kvreplay::testing {

class WrappedBackend : public Backend {
 public:
  explicit WrappedBackend(int threads) : sound_(make_backend("cpu", threads)) {}

  std::string description() const override { return "wrapped"; }
  Matrix attention_sums(const LayerTensors& layer, const AttentionSums& what) override {
    return sound_->attention_sums(layer, what);
  }
  KeptMoments kept_moments(const LayerTensors& layer, std::span<const std::int32_t> queries, int boundary,
                           std::span<const KeptSets> sets, MomentParts parts) override {
    return sound_->kept_moments(layer, queries, boundary, sets, parts);
  }
  std::vector<ComparedSet> compare_sets(const LayerTensors& layer, std::span<const ChangedSet> sets,
                                        std::span<const std::int32_t> queries, int boundary, bool vectors) override {
    return sound_->compare_sets(layer, sets, queries, boundary, vectors);
  }
  std::vector<std::int32_t> online_eviction(const LayerTensors& layer, const OnlineEviction& what) override {
    return sound_->online_eviction(layer, what);
  }
  std::vector<std::int32_t> least_redundant(const LayerTensors& layer, const RedundancyElimination& what) override {
    return sound_->least_redundant(layer, what);
  }
  Matrix norms(const TensorView& tensor, int tokens, double p) override { return sound_->norms(tensor, tokens, p); }
  std::vector<double> similarity_row_maxima(const TensorView& tensor, int tokens) override {
    return sound_->similarity_row_maxima(tensor, tokens);
  }
  std::size_t working_set(const LayerTensors& layer, const Workload& work) const override {
    return sound_->working_set(layer, work);
  }

 private:
  std::unique_ptr<Backend> sound_;
};

}  // namespace kvreplay::testing
