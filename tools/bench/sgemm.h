// OpenBLAS's product of two 2048 x 2048 float32 matrices: the yardstick.
#pragma once

#include <vector>

namespace kvreplay::bench {

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

}  // namespace kvreplay::bench
