#include "measurement.h"

#include <cblas.h>
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>

namespace kvreplay::bench {
namespace {

constexpr double shortest_batch = 0.02;  // seconds: below it a single call is too short to time
constexpr double enough = 2.0;           // seconds timed in all
constexpr int least_rounds = 3;
constexpr int most_rounds = 7;
constexpr double long_call = 4.0;  // seconds: the first call will do

/// Bytes of the line NAME of /proc/self/status.
std::size_t status_bytes(const std::string& name) {
  std::ifstream file("/proc/self/status");
  std::string line;
  while (std::getline(file, line))
    if (line.starts_with(name + ":")) return std::stoull(line.substr(name.size() + 1)) * 1024;
  return 0;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

}  // namespace

double seconds_of(const std::function<void()>& call, int calls) {
  using namespace std::chrono;
  const auto begin = steady_clock::now();
  for (int i = 0; i < calls; ++i) call();
  return duration<double>(steady_clock::now() - begin).count() / calls;
}

double Sgemm::rate(int threads) {
  constexpr auto count = static_cast<std::size_t>(size) * size;
  if (a_.empty()) {
    a_.assign(count, 1.25F);
    b_.assign(count, -0.75F);
    c_.assign(count, 0.0F);
    rate(threads);  // starts OpenBLAS's threads
  }
  openblas_set_num_threads(threads);
  const double seconds = seconds_of(
      [&] {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, size, size, size, 1.0F, a_.data(), size, b_.data(), size,
                    0.0F, c_.data(), size);
      },
      1);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  return 2.0 * size * static_cast<double>(count) / seconds;
}

const char* blas_description() {
  static const std::string text = std::string(openblas_get_config()).substr(0, 15) + " " + openblas_get_corename();
  return text.c_str();
}

FirstCall first_call(const Prepared& prepared) {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak begins again
  const std::size_t before = status_bytes("VmRSS");
  FirstCall first{.seconds = seconds_of(prepared.call, 1)};
  const std::size_t own = before + prepared.result_bytes, peak = status_bytes("VmHWM");
  first.extra_bytes = peak > own ? peak - own : 0;
  return first;
}

Rounds measure(const Prepared& prepared, int threads, double first_seconds, Sgemm& sgemm) {
  const int calls = std::clamp(static_cast<int>(shortest_batch / std::max(first_seconds, 1e-9)), 1, 1000);
  const bool is_long = first_seconds >= long_call;
  const int wanted =
      is_long ? 1 : std::clamp(static_cast<int>(enough / (first_seconds * calls)), least_rounds, most_rounds);
  std::vector<double> seconds, shares;
  double before = sgemm.rate(threads);
  for (int round = 0; round < wanted; ++round) {
    seconds.push_back(is_long ? first_seconds : seconds_of(prepared.call, calls));
    // Our own threads wait actively for a moment, too.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const double after = sgemm.rate(threads);
    shares.push_back(prepared.work / seconds.back() / (0.5 * (before + after)));
    before = after;
  }
  const auto [fastest, slowest] = std::ranges::minmax(seconds);
  const double middle = median(seconds);
  return {.seconds = middle, .of_sgemm = median(shares), .spread = (slowest - fastest) / middle};
}

}  // namespace kvreplay::bench
