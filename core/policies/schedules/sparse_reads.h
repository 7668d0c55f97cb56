// Policies that keep all tokens, of which each query reads some.
#pragma once

#include <vector>

#include "policies/policy.h"

namespace kvreplay {

/// A schedule whose queries each read some tokens of the prompt, all of which are kept as they are.
class SparseReads : public Schedule {
 public:
  std::string name() const override { return "queries that each read some tokens"; }
  Decision decided() const override { return Decision::never; }
  Requirements required() const override;
};

/// The layers in which each query reads all tokens. `needs`: queries that an index is made from.
struct DenseLayers {
  int dense_layers = 0;

  void parameters(Parameters& p);
  std::vector<LayerPlan> plans(int layers, const SchedulePtr& sparse, Needs needs = {}) const;
};

}  // namespace kvreplay
