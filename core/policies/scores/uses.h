// Recency and frequency of use, as caches of other programs rank their entries (LRU, LFU).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// [Hkv, n]: position of the last query t > j that uses token j, j where there is none. A query uses a token that has
/// more than the average of its attention: a group mean above (1 + 1e-6) / (resident tokens that the query sees).
Scorer last_use_score();

/// [Hkv, n]: number of queries t > j that use token j; a fraction below 1 breaks ties by the last use.
Scorer use_count_score();

}  // namespace kvreplay
