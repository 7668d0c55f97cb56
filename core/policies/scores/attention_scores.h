// Scores that are sums of attention as they stand.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// [H, n]: attention received from all queries that have come (H2O).
Scorer cumulative_score();

/// [H, n]: the same divided by how many of those queries could see the token: a mean, which does not favour early ones.
Scorer observed_score();

/// [H, n]: attention of the newest query alone (TOVA).
Scorer newest_score();

/// [H, P]: attention that the eval queries will pay: what oracles see.
Scorer eval_score();

}  // namespace kvreplay
