#include "policies/policy.h"

namespace kvreplay {

Registry<PolicyEntry>& policies() {
  static Registry<PolicyEntry> registry{"policy"};
  return registry;
}

void append_plans(std::vector<LayerPlan>& plans, const Policy& policy, int layers) {
  const int first = plans.empty() ? 0 : plans.back().first + plans.back().count;
  if (layers < 1) return;
  for (LayerPlan& plan : policy.plans(layers)) {
    plan.first += first;
    plans.push_back(std::move(plan));
  }
}

}  // namespace kvreplay
