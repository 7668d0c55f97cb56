// How cells are measured at the eval queries of a layer.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "replay/jobs.h"
#include "replay/resident_layers.h"

namespace kvreplay {

class CellMeasurement {
 public:
  CellMeasurement(const ReplayedTrace& of, Jobs& jobs) : of_(of), jobs_(jobs) {}

  /// Reports what the cells of a walk keep of a layer, and measures it. `paired`: layers that this one is stored with.
  void measure(const LayerView& view, bool second_walk, const std::map<int, PairedLayer>& paired);

 private:
  /// How one cell is measured in one layer.
  struct Measured {
    const Job* job;
    const LayerSelection* selection;
    std::shared_ptr<StoredLayer> stored = {};      // what the store made of the layer; null: it is as it was
    std::shared_ptr<EvolvingLayer> evolving = {};  // the same of a store that changes it at each eviction
    Positions positions = Positions::original;
    std::vector<KeptSet> by_query = {};  // of the block under way, where sets change with time

    bool is_general() const { return stored || evolving || positions == Positions::cache || selection->reads.weights; }
  };

  /// Enters what the queries of cells read. Those of one policy are scored once for all of its budgets.
  void find_reads(const LayerView& view, bool second_walk);
  Measured prepared(const Job& job, const LayerView& view, const std::map<int, PairedLayer>& paired) const;
  void measure_in_blocks(const LayerView& view, std::vector<Measured>& to_measure);
  KeptMoments kept_moments(const LayerView& view, std::span<const std::int32_t> queries, std::span<const KeptSets> sets,
                           MomentParts parts) const;
  bool is_measured(const LayerView& view, int query_head) const;
  /// Of the cells that are general, by their number; equal ones are compared once.
  std::map<std::size_t, ComparedSet> compare(const LayerView& view, std::span<const Measured> cells,
                                             std::span<const KeptSets> sets, std::span<const std::int32_t> queries,
                                             bool vectors) const;
  void cross_check(const LayerView& view, const Measured& cell, KeptSets sets, std::size_t first,
                   std::span<const std::int32_t> block);

  const ReplayedTrace& of_;
  Jobs& jobs_;
};

}  // namespace kvreplay
