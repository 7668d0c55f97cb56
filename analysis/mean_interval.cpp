#include "analysis/mean_interval.h"

#include <boost/math/distributions/students_t.hpp>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <string_view>
#include <vector>

namespace kvreplay {

double half_width(std::span<const double> sums, std::span<const double> counts) {
  double sum = 0, count = 0, samples = 0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (counts[i] == 0) continue;
    sum += sums[i];
    count += counts[i];
    ++samples;
  }
  if (samples < 2) return std::numeric_limits<double>::quiet_NaN();
  double squares = 0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (counts[i] == 0) continue;
    const double deviation = sums[i] - counts[i] * (sum / count);
    squares += deviation * deviation;
  }
  const double t = boost::math::quantile(boost::math::students_t(samples - 1), 0.975);
  return t * std::sqrt(samples / (samples - 1) * squares) / count;
}

MeanInterval mean_interval(std::span<const double> values, std::span<const std::string> prompts) {
  double sum = 0;
  MeanInterval found;
  std::map<std::string_view, std::size_t> places;  // by prompt
  std::vector<double> sums, counts;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) continue;
    const std::size_t place = places.try_emplace(prompts[i], places.size()).first->second;
    sums.resize(places.size());
    counts.resize(places.size());
    sums[place] += values[i];
    ++counts[place];
    sum += values[i];
    ++found.count;
  }
  if (found.count == 0) return found;
  found.mean = sum / found.count;
  found.half_width = half_width(sums, counts);
  return found;
}

}  // namespace kvreplay
