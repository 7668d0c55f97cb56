// What is timed: one call of the backend on some data, at one SIMD level, with some threads, under a name that says so.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "attention/backend.h"

namespace kvreplay::bench {

/// What a float64 computation says of an answer.
struct Verdict {
  double relative_error = 0;  // the largest
  std::string problem = {};   // empty: the answer is right
  struct Counter {
    std::string name;
    double value = 0;
  };
  std::vector<Counter> counters = {};  // further things worth printing
};

/// |found - expected|; infinity, which no tolerance admits, where the answer is no finite number.
inline double distance(double found, double expected) {
  return std::isfinite(found) ? std::abs(found - expected) : std::numeric_limits<double>::infinity();
}

inline Verdict verdict_of(double error, double tolerance) {
  return {.relative_error = error, .problem = error > tolerance ? fmt::format("error {:.2g}", error) : ""};
}

/// A call whose inputs are made.
struct Prepared {
  std::function<void()> call;                   // its result stays until the next call
  std::function<Verdict()> check;               // of the last result
  std::function<std::vector<double>()> result;  // the last result as plain numbers, for other programs
  std::size_t result_bytes = 0;  // what the caller gets, all other memory being extra; 0: memory is not told
  double work = 0;               // useful operations, or bytes, of one call
};

enum class Rate { operations, bytes };

struct Case {
  std::string name;
  Rate rate = Rate::operations;
  int threads = 1;
  std::function<Prepared()> prepare;
};

using Cases = std::vector<Case>;

/// One case for each SIMD level of this machine and for one thread and all: NAME/LEVEL/threads:N. `prepare` gets a
/// fresh backend.
void add_at_every_level(Cases& cases, const std::string& name, Rate rate,
                        const std::function<Prepared(std::shared_ptr<Backend>)>& prepare);

/// Of a matrix of float64.
constexpr std::size_t product_bytes(int rows, int columns) {
  return sizeof(double) * static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
}

/// The value that was made last, for as long as the same key is asked for: cases that follow each other share their
/// data and what float64 says of it.
template <class T>
class Latest {
 public:
  template <class Make>
  std::shared_ptr<const T> get(std::string_view key, Make make) {
    if (value_ == nullptr || key != key_) {
      value_.reset();
      value_ = std::make_shared<const T>(make());
      key_ = key;
    }
    return value_;
  }

 private:
  std::string key_;
  std::shared_ptr<const T> value_;
};

}  // namespace kvreplay::bench
