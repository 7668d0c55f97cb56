#include "policies/schedules/sparse_reads.h"

#include <algorithm>

namespace kvreplay {

Requirements SparseReads::required() const {
  constexpr const char* reason = "each query reads some of the whole prompt, as it is";
  constexpr const char* remedy = "no other allocator and store";
  return {{Property::every_token, reason, remedy}, {Property::unchanged, reason, remedy}};
}

void DenseLayers::parameters(Parameters& p) {
  p.add("dense_layers", dense_layers, IntRange{.up_to = UpTo::layers},
        "first layers, in which each query reads all tokens");
}

std::vector<LayerPlan> DenseLayers::plans(int layers, const SchedulePtr& sparse, Needs needs) const {
  const int dense = std::min(dense_layers, layers);
  std::vector<LayerPlan> all;
  if (dense > 0) all.push_back({0, dense, {.allocate = every_token()}});
  if (dense < layers)
    all.push_back({dense, layers - dense, {.score = {.needs = needs}, .allocate = every_token(), .schedule = sparse}});
  return all;
}

}  // namespace kvreplay
