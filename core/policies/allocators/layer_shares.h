// How the budget is divided over layers by numbers that the user gives, one for each.
#pragma once

#include <vector>

#include "policies/policy.h"

namespace kvreplay {

/// Layer l of L gets L*B shares[l] / Σ shares slots, tokens that stay by rule included, between these and P of them:
/// apportioned, so that the sum is exactly L*B. The counts throw Error{usage} unless there is a share for each layer.
ByLayer by_shares(std::vector<double> shares);

}  // namespace kvreplay
