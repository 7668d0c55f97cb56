// The mean of a metric over traces, with its 95 % confidence interval.
#pragma once

#include <limits>
#include <span>

namespace kvreplay {

struct MeanInterval {
  double mean = std::numeric_limits<double>::quiet_NaN();
  double half_width = std::numeric_limits<double>::quiet_NaN();  // NaN: fewer than two values
  int count = 0;                                                 // finite values
};

/// mean ± t s / sqrt(n) over the finite values: s their standard deviation with n - 1 degrees of freedom, t the 97.5 %
/// quantile of Student's t distribution with as many. The traces count as independent, and policies are not paired;
/// `kvreplay compare` pairs them and resamples prompts (tools/python/kvreplay/compare/statistics.py).
MeanInterval mean_interval(std::span<const double> values);

}  // namespace kvreplay
