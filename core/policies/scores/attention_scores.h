// Scores that are sums of attention.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// [H, n]: accumulated attention of all queries so far (H2O).
Scorer cumulative_score();

/// [H, n]: the same divided by the number of those queries that see the token: a mean without bias to early tokens.
Scorer observed_score();

/// [H, n]: attention of the last query (TOVA).
Scorer newest_score();

/// [H, P]: attention of the eval queries, for oracles.
Scorer eval_score();

}  // namespace kvreplay
