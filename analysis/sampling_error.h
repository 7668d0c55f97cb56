// The error of estimates from a sample whose units were drawn in pairs (replay/sample.h).
#pragma once

#include <span>
#include <vector>

namespace kvreplay {

/// The probability that an interval misses the exact value.
inline constexpr double missed_by_intervals = 0.05;

/// The estimated variance of an estimate.
struct SamplingError {
  double variance = 0;
  double degrees = 0;  // of freedom

  /// Half the width of the interval that misses the exact value with probability `missed`: the quantile of Student's t
  /// distribution times the standard error.
  double half_width(double missed = missed_by_intervals) const;
  /// Of the estimate times a number whose square is `factor`.
  SamplingError times(double factor) const { return {factor * variance, degrees}; }
};

/// Of estimates whose errors add up; the degrees of freedom after Satterthwaite (Biometrics Bulletin 2, 1946).
SamplingError operator+(SamplingError a, SamplingError b);

/// Of the mean of values in pairs, of `population` units: (1 - n/N) / n² times the sum of (y - y')² over the n/2 pairs
/// (Cochran, Sampling Techniques, 3rd edition, section 5.6 for two units a stratum). Where strata differ in size by one
/// unit, 1 - n/N is at least the mean of their own corrections, so the variance is not underestimated. The degrees of
/// freedom are (sum of (y - y')²)² / (sum of (y - y')⁴), as of strata with one degree each (Cochran, equation 5.16
/// after Satterthwaite): fewer than n/2 where few pairs make most of the variance.
SamplingError error_of_pairs(std::span<const double> values, int population);

/// Values whose mean is R = sqrt(sum of `parts` / sum of `wholes`), and whose variance is that of R to first order: R +
/// n (p - R² w) / (2 R W), with W the sum of the n wholes (Wolter, Introduction to Variance Estimation, chapter 6).
std::vector<double> linearised_root(std::span<const double> parts, std::span<const double> wholes);

/// n T - (n - 1) T_i for each of n values, with T_i the statistic without value i: the values themselves where it is
/// their mean, and to first order values whose mean it is (Wolter, chapter 4).
std::vector<double> pseudo_values(std::span<const double> values, double (*statistic)(std::span<const double>));

}  // namespace kvreplay
