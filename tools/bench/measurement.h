// How a call is timed: in rounds, each followed by OpenBLAS at as many threads, so that both see the same machine.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "benchmark_case.h"

namespace kvreplay::bench {

/// OpenBLAS's product of two 2048 x 2048 float32 matrices: the yardstick.
class Sgemm {
 public:
  /// Operations a second of one product. Sleeps for 100 ms after it, because OpenBLAS's threads spin for a while and
  /// would take the cores from whatever is timed next.
  double rate(int threads);

  static constexpr int size = 2048;

 private:
  std::vector<float> a_, b_, c_;
};

/// "OpenBLAS 0.3.21 SkylakeX".
const char* blas_description();

/// Seconds of `calls` calls in a row.
double seconds_of(const std::function<void()>& call, int calls);

struct FirstCall {
  double seconds = 0;
  std::size_t extra_bytes = 0;  // by which resident memory grew at its peak, beyond what it left as a result
};

/// The call that nothing has prepared the backend for.
FirstCall first_call(const Prepared& prepared);

struct Rounds {
  double seconds = 0;   // of one call: the median
  double of_sgemm = 0;  // the median over rounds of the rate as a share of OpenBLAS's
  double spread = 0;    // (slowest - fastest) / median
};

/// `first_seconds`: of a call before; a long one is the only round.
Rounds measure(const Prepared& prepared, int threads, double first_seconds, Sgemm& sgemm);

}  // namespace kvreplay::bench
