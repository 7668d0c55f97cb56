// One-dimensional pooling of scores over neighbouring tokens, stride 1, same length.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

enum class Pool { none, max, average };

/// Pools columns [0, columns) of every row; later columns are left alone. `max` is taken over the neighbours that
/// exist; `average` divides their sum by `kernel` also at the ends, where fewer exist (SnapKV's code: zeros are
/// counted).
Matrix pooled(Matrix scores, Pool pool, int kernel, int columns);

void add_pooling(Parameters& p, Pool& pool, int& kernel);

}  // namespace kvreplay
