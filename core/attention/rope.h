// Moving a rotated vector to another position.
#pragma once

#include <span>
#include <vector>

#include "tensor.h"

namespace kvreplay {

/// rot(x, distance): turns pair i of `vector` by distance * inv_freq[i] radians, angles in float64. The stored vector
/// carries attention_scaling already; it is not applied again.
void rotate(const Rope& rope, int distance, std::span<float> vector);
void rotate(const Rope& rope, int distance, std::span<double> vector);

/// The same bits for many vectors that move back: sines and cosines of the distances -farthest ... 0, computed once.
class BackwardRotation {
 public:
  BackwardRotation() = default;
  BackwardRotation(const Rope& rope, int farthest) { cover(rope, farthest); }

  /// Adds the distances that are missing; begins again if the frequencies are others.
  void cover(const Rope& rope, int farthest);
  void apply(int distance, std::span<float> vector) const;
  void apply(int distance, std::span<double> vector) const;

 private:
  template <class Number>
  void turn_pairs(int distance, std::span<Number> vector) const;

  std::vector<double> frequencies_;  // [pairs]
  bool interleaved_ = false;
  std::size_t offset_ = 0;
  int distances_ = 0;
  std::vector<double> cosines_, sines_;  // [distances, pairs]
};

/// mean over i < count of rot(·, first + i): what a vector is turned to on average at the positions that come next.
class MeanRotation {
 public:
  MeanRotation(const Rope& rope, int first, int count);

  void apply(std::span<double> vector) const;

 private:
  bool interleaved_;
  std::size_t offset_;
  std::vector<double> cosines_, sines_;  // [pairs]
};

}  // namespace kvreplay
