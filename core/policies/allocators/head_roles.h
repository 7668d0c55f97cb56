// What a KV head does, from the means of its queries and keys alone: kvpress' stand-in for the trained gates of
// DuoAttention (Xiao et al. 2024, arXiv:2410.10819).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// [Hkv, n], the same for each token of a head: group mean of the area under the cumulated attention that the mean
/// query, at the last of 500 positions, pays to the mean key at all of them, both un-rotated means of this prompt
/// turned to those places: mean over i of Σ_{j <= i} a_j.
Scorer head_role_score();

}  // namespace kvreplay
