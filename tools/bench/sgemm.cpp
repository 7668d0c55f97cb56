#include "sgemm.h"

#include <cblas.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <thread>

namespace kvreplay::bench {

double Sgemm::rate(int threads) {
  using namespace std::chrono;
  constexpr auto count = static_cast<std::size_t>(size) * size;
  if (a_.empty()) {
    a_.assign(count, 1.25F);
    b_.assign(count, -0.75F);
    c_.assign(count, 0.0F);
    rate(threads);  // starts OpenBLAS's threads
  }
  openblas_set_num_threads(threads);
  const auto begin = steady_clock::now();
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, size, size, size, 1.0F, a_.data(), size, b_.data(), size, 0.0F,
              c_.data(), size);
  const double seconds = duration<double>(steady_clock::now() - begin).count();
  std::this_thread::sleep_for(milliseconds(100));
  return 2.0 * size * static_cast<double>(count) / seconds;
}

const char* blas_description() {
  static const std::string text = std::string(openblas_get_config()).substr(0, 15) + " " + openblas_get_corename();
  return text.c_str();
}

}  // namespace kvreplay::bench
