#include "analysis/mean_interval.h"

#include <algorithm>
#include <boost/math/distributions/students_t.hpp>
#include <cmath>
#include <iterator>
#include <vector>

#include "analysis/metrics/metric.h"

namespace kvreplay {

MeanInterval mean_interval(std::span<const double> values) {
  std::vector<double> finite;
  std::ranges::copy_if(values, std::back_inserter(finite), [](double value) { return std::isfinite(value); });
  MeanInterval found{.count = static_cast<int>(finite.size())};
  if (finite.empty()) return found;
  found.mean = mean(finite);
  if (finite.size() < 2) return found;
  double squares = 0;
  for (const double value : finite) squares += (value - found.mean) * (value - found.mean);
  const double freedom = found.count - 1;
  const double t = boost::math::quantile(boost::math::students_t(freedom), 0.975);
  found.half_width = t * std::sqrt(squares / freedom / found.count);
  return found;
}

}  // namespace kvreplay
