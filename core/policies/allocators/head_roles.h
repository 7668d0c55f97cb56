// Role of a KV head (retrieval or streaming) from the means of its queries and keys: the approximation of kvpress for
// the trained gates of DuoAttention (Xiao et al. 2024, arXiv:2410.10819).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// [Hkv, n], the same for each token of a head: group mean of the area under the cumulative attention of the mean
/// query, at the last of 500 positions, to the mean key at all of them. Both are means before RoPE over this prompt,
/// rotated to those positions: mean over i of Σ_{j <= i} a_j.
Scorer head_role_score();

}  // namespace kvreplay
