// A backend whose answers are written by hand, and which counts what it is asked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/backend.h"

namespace kvreplay::testing {

class FakeBackend final : public Backend {
 public:
  Matrix sums;
  Matrix norm_values;
  KeptMoments moments;
  std::vector<Comparison> comparisons;
  std::vector<std::int32_t> evicted;
  std::vector<std::int32_t> kept_tokens;
  std::vector<double> similarities;

  int calls = 0;
  std::vector<std::int32_t> asked_queries;
  AttentionSums asked;  // its spans are not kept
  double asked_norm = 0;
  std::vector<std::int32_t> asked_budgets, asked_recents;

  std::string description() const override { return "fake"; }
  Matrix attention_sums(const LayerTensors&, const AttentionSums& what) override {
    ++calls;
    asked_queries.assign(what.queries.begin(), what.queries.end());
    asked = what;
    return sums;
  }
  KeptMoments kept_moments(const LayerTensors&, std::span<const std::int32_t>, int, std::span<const KeptSets>,
                           MomentParts) override {
    ++calls;
    return moments;
  }
  std::vector<ComparedSet> compare_sets(const LayerTensors&, std::span<const ChangedSet>, std::span<const std::int32_t>,
                                        int, bool) override {
    ++calls;
    return {{comparisons, {}}};
  }
  std::vector<std::int32_t> online_eviction(const LayerTensors&, const OnlineEviction& what) override {
    ++calls;
    asked_budgets.assign(what.budgets.begin(), what.budgets.end());
    asked_recents.assign(what.recents.begin(), what.recents.end());
    return evicted;
  }
  std::vector<std::int32_t> least_redundant(const LayerTensors&, const RedundancyElimination&) override {
    ++calls;
    return kept_tokens;
  }
  Matrix norms(const TensorView&, int, double p) override {
    ++calls;
    asked_norm = p;
    return norm_values;
  }
  std::vector<double> similarity_row_maxima(const TensorView&, int) override {
    ++calls;
    return similarities;
  }
  std::size_t working_set(const LayerTensors&, const Workload&) const override { return 0; }
};

}  // namespace kvreplay::testing
