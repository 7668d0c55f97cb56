#include "policies/policy.h"

namespace kvreplay {

Registry<PolicyEntry>& policies() {
  static Registry<PolicyEntry> registry{"policy"};
  return registry;
}

Registry<PartCard>& parts() {
  static Registry<PartCard> registry{"part"};
  return registry;
}

}  // namespace kvreplay
