// Where kept tokens stand, as a parameter.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

void add_positions(Parameters& p, Positions& positions);

/// The store that leaves tokens where they were, or moves them to their slots.
Store store_at(Positions positions);

}  // namespace kvreplay
