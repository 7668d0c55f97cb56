// Facts that follow from a policy's plans and parameters: the columns of the table of policies.
#pragma once

#include <string>

#include "policies/text/configured.h"

namespace kvreplay {

struct PolicyFacts {
  std::string granularity;  // the unit that is kept, and the heads or layers that share a set
  std::string needs;        // the inputs beside the keys and values of a trace
  std::string type;         // when it decides, and how it allocates the budget
  std::string cost;         // of scoring, per layer and head
};

/// Of the policy with its values, for a model with a few layers.
PolicyFacts facts_of(const ConfiguredPolicy& policy);

}  // namespace kvreplay
