// Expected attention of future queries (Devoto et al. 2025, Expected Attention,
// arXiv:2510.00636).
#pragma once

#include "attention/rope.h"
#include "policies/policy.h"

namespace kvreplay {

/// Queries are taken as Gaussian: mean mu and covariance Sigma are those of the queries so far before RoPE, without
/// the first `sinks`. They are rotated by R, the mean of attention_scaling rot(., p) over the next `future`
/// positions p, so that a key expects the logarithm of
///   z_j = scale <R mu, k_j> + scale^2 / 2 k_j' R Sigma R' k_j
/// (the mean of exp of a Gaussian; without `covariance` the first term alone).
struct ExpectedAttention {
  int sinks = 4;
  int future = 512;
  double epsilon = 0;
  bool covariance = true;
  bool vnorm = true;

  void parameters(Parameters& p);
};

/// [H, n]: for each query head the softmax of z over all but the protected first tokens, plus epsilon, times |v_j|_2
/// (`vnorm`); then as the plan groups heads. The protected ones have the largest score of their row.
Scorer expected_attention_score(const ExpectedAttention& values);

/// R: the mean rotation to the next `future` positions, those after all tokens so far, or with cache positions the next
/// slots.
MeanRotation mean_future_rotation(const LayerView& view, int future);

}  // namespace kvreplay
