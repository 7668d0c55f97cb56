// Moving a rotated vector to another position.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "tensor.h"

namespace kvreplay {

/// rot(x, distance): turns pair i of `vector` by distance * inv_freq[i] radians, angles in float64. The stored vector
/// carries attention_scaling already; it is not applied again.
void rotate(const Rope& rope, int distance, std::span<float> vector);
void rotate(const Rope& rope, int distance, std::span<double> vector);

/// The same bits for many vectors that move back: sines and cosines of the distances -farthest ... 0. Those of the
/// two sets of frequencies used last are kept, so that layers and policies share them.
class BackwardRotation {
 public:
  BackwardRotation() = default;
  BackwardRotation(const Rope& rope, int farthest);

  void apply(int distance, std::span<float> vector) const;
  void apply(int distance, std::span<double> vector) const;

 private:
  template <class Number>
  void turn_pairs(int distance, std::span<Number> vector) const;

  struct Angles {
    std::vector<double> frequencies;     // [pairs]
    int distances = 0;                   // 0, -1 ...
    std::vector<double> cosines, sines;  // [distances, pairs]
  };
  static std::shared_ptr<const Angles> angles_of(std::span<const double> frequencies, int farthest);

  bool interleaved_ = false;
  std::size_t offset_ = 0;
  std::shared_ptr<const Angles> angles_;
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
