#include "analysis/mean_interval.h"

#include <boost/math/distributions/students_t.hpp>
#include <cmath>
#include <cstddef>
#include <map>
#include <string_view>

namespace kvreplay {

MeanInterval mean_interval(std::span<const double> values, std::span<const std::string> prompts) {
  double sum = 0;
  MeanInterval found;
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    sum += value;
    ++found.count;
  }
  if (found.count == 0) return found;
  found.mean = sum / found.count;
  std::map<std::string_view, double> deviations;  // by prompt
  for (std::size_t i = 0; i < values.size(); ++i)
    if (std::isfinite(values[i])) deviations[prompts[i]] += values[i] - found.mean;
  if (deviations.size() < 2) return found;
  double squares = 0;
  for (const auto& [prompt, deviation] : deviations) squares += deviation * deviation;
  const auto samples = static_cast<double>(deviations.size());
  const double t = boost::math::quantile(boost::math::students_t(samples - 1), 0.975);
  found.half_width = t * std::sqrt(samples / (samples - 1) * squares) / found.count;
  return found;
}

}  // namespace kvreplay
