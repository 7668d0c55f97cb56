#include "policies/schedule.h"

#include "error.h"
#include "policies/selection.h"

namespace kvreplay {

Requirements Schedule::required() const {
  if (decided() != Decision::during_prefill) return {};
  return {
      {Property::fills_budget, "a schedule needs the same number of tokens in every head",
       "a selector that fills its budget"},
      {Property::uniform, "a schedule needs the same number of tokens in every layer and head", "allocate=uniform"}};
}

LayerSelection Schedule::run(const ScheduledLayer& layer) const {
  throw Error{Refusal::internal, layer.policy, name() + " changes no sets"};
}

LayerSelection Schedule::after(const ScheduledLayer& layer, const OnlineCall&, std::span<const std::int32_t>) const {
  throw Error{Refusal::internal, layer.policy, name() + " evicts nothing online"};
}

}  // namespace kvreplay
