// Inner products of vectors with many others, in float64 on this machine.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "cpu/combination_kernels.h"
#include "observables/vector_statistics.h"

namespace kvreplay {

/// The vectors of one head in panels, each channel by channel, so that the products with neighbouring vectors are
/// computed together, from memory that is read in its order.
class VectorProducts {
 public:
  VectorProducts(const Vectors& vectors, int head);

  int count() const { return count_; }
  int dim() const { return dim_; }
  /// <x, vector first + i> for all i < products.size(). Equal vectors have equal products.
  void with(std::span<const double> x, int first, std::span<double> products) const;
  /// The same of several vectors, [lists, dim] to [lists, n].
  void with_each(std::span<const double> xs, int first, std::span<double> products) const;
  /// Vector i.
  void read(int i, std::span<double> vector) const;

 private:
  static constexpr std::size_t panel = 16;  // vectors; 16 KiB of 128 channels, which the L1 cache holds for all lists

  std::size_t place(int i) const;  // of channel 0 of vector i; the next channel is `panel` numbers on

  int count_, dim_;
  const CombinationKernels& kernels_;
  std::vector<double> channels_;  // [panels, dim, panel]
};

/// Adds the multiple of a vector to others, each as long, of which none is the vector.
void add_to_each(double factor, std::span<const double> vector, std::span<double* const> others);

}  // namespace kvreplay
