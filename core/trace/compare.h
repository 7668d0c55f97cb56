// Two traces, object by object.
#pragma once

#include <string>
#include <vector>

#include "trace/trace.h"

namespace kvreplay {

/// One object that differs: `where` the first difference lies ("head 0, position 3, component 1"; empty for whole
/// objects), and what either side has there.
struct TraceDifference {
  std::string object;
  std::string where;
  std::string first;
  std::string second;
  double largest = 0.0;  // of |first - second| over the object, tensors of equal shape only
};

/// In the order of the format; empty: equal. Numbers of tensors may differ by `tolerance`, everything else by nothing;
/// `producer` and `created` are not compared. Tensors of different stored types compare by value.
std::vector<TraceDifference> compare(const Trace& first, const Trace& second, double tolerance = 0.0);

}  // namespace kvreplay
