// Per-layer budgets in proportions that the user gives, one for each layer.
#pragma once

#include <vector>

#include "policies/policy.h"

namespace kvreplay {

/// Layer l of L gets L*B shares[l] / Σ shares slots, protected tokens included, at least these and at most P:
/// apportioned, so that the sum is exactly L*B. The counts throw Error{usage} unless there is a share for each layer.
ByLayer by_shares(std::vector<double> shares);

}  // namespace kvreplay
