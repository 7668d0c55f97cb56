#include "analysis/sampling_error.h"

#include <boost/math/distributions/students_t.hpp>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "analysis/metrics/quotients.h"

namespace kvreplay {

double SamplingError::half_width(double missed) const {
  if (variance == 0) return 0;
  return boost::math::quantile(boost::math::students_t(degrees), 1 - missed / 2) * std::sqrt(variance);
}

SamplingError error_of_pairs(std::span<const double> values, int population) {
  const auto count = static_cast<double>(values.size());
  double squares = 0, fourth_powers = 0;
  for (std::size_t i = 0; i + 1 < values.size(); i += 2) {
    const double square = std::pow(values[i] - values[i + 1], 2);
    squares += square;
    fourth_powers += square * square;
  }
  if (fourth_powers == 0) return {};
  return {(1 - count / population) * squares / (count * count), squares * squares / fourth_powers};
}

SamplingError operator+(SamplingError a, SamplingError b) {
  const double variance = a.variance + b.variance;
  double reciprocal = 0;  // of the degrees, by shares: squares of small variances would be 0
  for (const SamplingError& one : {a, b})
    if (one.variance > 0) reciprocal += std::pow(one.variance / variance, 2) / one.degrees;
  return {variance, reciprocal > 0 ? 1 / reciprocal : 0};
}

std::vector<double> pseudo_values(std::span<const double> values, double (*statistic)(std::span<const double>)) {
  const auto count = static_cast<double>(values.size());
  std::vector<double> others(values.begin() + 1, values.end()), pseudo;
  for (std::size_t i = 0; i < values.size(); ++i) {
    pseudo.push_back(count * statistic(values) - (count - 1) * statistic(others));
    if (i < others.size()) others[i] = values[i];
  }
  return pseudo;
}

std::vector<double> linearised_root(std::span<const double> parts, std::span<const double> wholes) {
  const double part = std::accumulate(parts.begin(), parts.end(), 0.0);
  const double whole = std::accumulate(wholes.begin(), wholes.end(), 0.0);
  const double root = std::sqrt(quotient(part, whole, 0.0));
  std::vector<double> values(parts.size(), root);
  if (root == 0) return values;
  const double scale = static_cast<double>(parts.size()) / (2 * root * whole);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] += scale * (parts[i] - root * root * wholes[i]);
  return values;
}

}  // namespace kvreplay
