// A dense row-major matrix of doubles: the small result that observables and scores are.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace kvreplay {

class Matrix {
 public:
  Matrix() = default;
  Matrix(int rows, int columns, double value = 0.0)
      : rows_(rows),
        columns_(columns),
        values_(static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns), value) {}

  int rows() const { return rows_; }
  int columns() const { return columns_; }
  bool empty() const { return values_.empty(); }

  std::span<double> row(int r) { return {values_.data() + offset(r), static_cast<std::size_t>(columns_)}; }
  std::span<const double> row(int r) const { return {values_.data() + offset(r), static_cast<std::size_t>(columns_)}; }
  double& operator()(int r, int c) { return values_[offset(r) + static_cast<std::size_t>(c)]; }
  double operator()(int r, int c) const { return values_[offset(r) + static_cast<std::size_t>(c)]; }
  std::span<double> values() { return values_; }
  std::span<const double> values() const { return values_; }

 private:
  std::size_t offset(int r) const { return static_cast<std::size_t>(r) * static_cast<std::size_t>(columns_); }

  int rows_ = 0;
  int columns_ = 0;
  std::vector<double> values_;
};

}  // namespace kvreplay
