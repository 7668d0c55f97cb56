// Inner products of vectors with many others, in float64 on this machine.
#pragma once

#include <span>
#include <vector>

#include "cpu/combination_kernels.h"
#include "observables/vector_statistics.h"

namespace kvreplay {

/// The vectors of one head, channel by channel, so that the products with neighbouring vectors are computed together.
class VectorProducts {
 public:
  VectorProducts(const Vectors& vectors, int head);

  int count() const { return count_; }
  /// Divides vector i by a number.
  void divide(int i, double divisor);
  /// <x, vector first + i> for all i < products.size(). Equal vectors have equal products.
  void with(std::span<const double> x, int first, std::span<double> products) const;
  /// The same of several vectors, [lists, dim] to [lists, n].
  void with_each(std::span<const double> xs, int first, std::span<double> products) const;
  /// Vector i.
  void read(int i, std::span<double> vector) const;

 private:
  int count_, dim_;
  const CombinationKernels& kernels_;
  std::vector<double> channels_;  // [dim, count]
};

}  // namespace kvreplay
