// The mean of a metric over traces, with its 95 % confidence interval.
#pragma once

#include <limits>
#include <span>
#include <string>

namespace kvreplay {

struct MeanInterval {
  double mean = std::numeric_limits<double>::quiet_NaN();
  double half_width = std::numeric_limits<double>::quiet_NaN();  // NaN: fewer than two prompts
  int count = 0;                                                 // finite values
};

/// The mean of the finite values, one a trace, and the half width t s of its interval. Traces of one prompt are not
/// independent: the k prompts are the samples, as in `kvreplay compare` (tools/python/kvreplay/compare/statistics.py).
/// s^2 = k / (k - 1) sum over prompts of (sum of value - mean)^2 / n^2, for n values; t is the 97.5 % quantile of
/// Student's t distribution with k - 1 degrees of freedom. With one trace a prompt, s is the standard deviation over
/// sqrt(n). Policies are not paired; `kvreplay compare` pairs them. `prompts`: the prompt of each value.
MeanInterval mean_interval(std::span<const double> values, std::span<const std::string> prompts);

}  // namespace kvreplay
