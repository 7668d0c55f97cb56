// The mean of a metric over traces, with its 95 % confidence interval: in tables, figures, `kvreplay compare`,
// `kvreplay predict` and reports.
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

/// The half width t s of the interval of mean = sum of `sums` / n, n = sum of `counts`, for the sum and the number of
/// the values of each prompt. Traces of one prompt are not independent: the k prompts that have values are the samples.
/// s^2 = k / (k - 1) sum over prompts of (sum - count mean)^2 / n^2; t is the 97.5 % quantile of Student's t
/// distribution with k - 1 degrees of freedom. With one value a prompt, s is the standard deviation over sqrt(n). NaN
/// if k < 2. Source: Cochran 1977, Sampling Techniques, 3rd edition, section 9A.1 (means of clusters of unequal sizes).
double half_width(std::span<const double> sums, std::span<const double> counts);

/// The mean of the finite values, one a trace, and its interval. Policies are not paired; `kvreplay compare` pairs
/// them. `prompts`: the prompt of each value.
MeanInterval mean_interval(std::span<const double> values, std::span<const std::string> prompts);

}  // namespace kvreplay
