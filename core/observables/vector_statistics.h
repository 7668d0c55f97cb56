// What keys, values and queries say without attention: means, covariances, quadratic forms, cosines.
//
// O(n d) and O(n d²) in float64, host code for every backend: beside the O(n²) of a backend it is little work, on
// numbers that lie in this machine's memory anyway. Pieces are fixed and added in order, so the same input has the same
// bits whatever the number of threads.
#pragma once

#include <functional>
#include <span>

#include "matrix.h"

namespace kvreplay {

/// [heads, count] vectors of `dim` numbers.
struct Vectors {
  int heads = 0;
  int count = 0;
  int dim = 0;
  /// Reads vector i of a head, on any thread.
  std::function<void(int head, int i, std::span<double> vector)> read = {};
};

/// [heads, d] each: a mean in two parts, the first vector and the mean of the differences from it. What both are taken
/// from, one after the other, is exactly opposite for two vectors, and what is even in them ties as it should.
struct Centre {
  Matrix origin;
  Matrix offset;
};

/// [heads, d] and [heads, d * d], divided by the number of vectors; zeros where there are none.
struct VectorMoments {
  Centre centre;
  Matrix mean;
  Matrix covariance;
};

VectorMoments moments_of(const Vectors& vectors, int threads);

/// [heads, d * d]: Σ_i w_i y_i y_i' of y = x - c, with weights [heads, count]; no weights are 1, no centre is 0.
Matrix product_sums(const Vectors& vectors, const Matrix& weights, const Centre& centre, int threads);

/// [heads, count]: ‖x‖².
Matrix squared_lengths(const Vectors& vectors, int threads);

/// [heads, d]: mean of x / ‖x‖, a zero vector counting as 0.
Matrix mean_direction(const Vectors& vectors, int threads);

/// [heads, count]: cosine with each head's direction [heads, d]; 0 where either is zero.
Matrix cosines(const Vectors& vectors, const Matrix& directions, int threads);

/// y' A y + <b, y> of y = x - c. Each head is read by one row, or by as many neighbouring rows as any other.
struct QuadraticForms {
  Matrix matrices;     // A: [rows, d * d], symmetric
  Matrix linear = {};  // b: [rows, d]; empty: 0
  Centre centre = {};  // c; empty: 0
};

/// [rows, count].
Matrix values_of(const QuadraticForms& forms, const Vectors& vectors, int threads);

/// [rows, count]: ‖Σ_i weights_i x_i − x_j‖, of weights [rows, count]; each head is read by as many neighbouring rows.
Matrix distances_from_mean(const Vectors& vectors, const Matrix& weights, int threads);

/// [heads, count]: the vectors from `first` on come in partitions of `lag`; of each one that another whole one follows,
/// the standard deviation (divided by d - 1) over channels of (x - min) / (max - min), with the extremes of each
/// channel in the partition that follows; a channel whose extremes are equal counts as 0. Others have 0.
Matrix lag_deviations(const Vectors& vectors, int first, int lag, int threads);

}  // namespace kvreplay
