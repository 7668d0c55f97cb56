#include "attention/rope.h"

#include <cmath>
#include <cstddef>

namespace kvreplay {
namespace {

template <class Number>
void turn(Number& first, Number& second, double cosine, double sine) {
  const double x = static_cast<double>(first);
  const double y = static_cast<double>(second);
  first = static_cast<Number>(x * cosine - y * sine);
  second = static_cast<Number>(x * sine + y * cosine);
}

template <class Number>
void turn_pairs(const Rope& rope, int distance, std::span<Number> vector) {
  if (distance == 0) return;
  const std::size_t pairs = rope.inv_freq.size();
  vector = vector.subspan(static_cast<std::size_t>(rope.offset));
  for (std::size_t i = 0; i < pairs; ++i) {
    const double angle = static_cast<double>(distance) * rope.inv_freq[i];
    turn(vector[rope.interleaved ? 2 * i : i], vector[rope.interleaved ? 2 * i + 1 : i + pairs], std::cos(angle),
         std::sin(angle));
  }
}

}  // namespace

void rotate(const Rope& rope, int distance, std::span<float> vector) { turn_pairs(rope, distance, vector); }
void rotate(const Rope& rope, int distance, std::span<double> vector) { turn_pairs(rope, distance, vector); }

BackwardRotation::BackwardRotation(const Rope& rope, int farthest)
    : pairs_(rope.inv_freq.size()), interleaved_(rope.interleaved), offset_(static_cast<std::size_t>(rope.offset)) {
  const std::size_t angles = (static_cast<std::size_t>(farthest) + 1) * pairs_;
  cosines_.reserve(angles);
  sines_.reserve(angles);
  for (int distance = 0; distance <= farthest; ++distance) {
    for (const double frequency : rope.inv_freq) {
      cosines_.push_back(std::cos(-distance * frequency));
      sines_.push_back(std::sin(-distance * frequency));
    }
  }
}

void BackwardRotation::apply(int distance, std::span<double> vector) const {
  if (distance == 0) return;
  vector = vector.subspan(offset_);
  const double* cosines = cosines_.data() + static_cast<std::size_t>(-distance) * pairs_;
  const double* sines = sines_.data() + static_cast<std::size_t>(-distance) * pairs_;
  if (interleaved_) {
    for (std::size_t i = 0; i < pairs_; ++i) turn(vector[2 * i], vector[2 * i + 1], cosines[i], sines[i]);
  } else {
    for (std::size_t i = 0; i < pairs_; ++i) turn(vector[i], vector[i + pairs_], cosines[i], sines[i]);
  }
}

MeanRotation::MeanRotation(const Rope& rope, int first, int count)
    : interleaved_(rope.interleaved), offset_(static_cast<std::size_t>(rope.offset)) {
  for (const double frequency : rope.inv_freq) {
    double cosines = 0, sines = 0;
    for (int i = 0; i < count; ++i) {
      cosines += std::cos((first + i) * frequency);
      sines += std::sin((first + i) * frequency);
    }
    cosines_.push_back(cosines / count);
    sines_.push_back(sines / count);
  }
}

void MeanRotation::apply(std::span<double> vector) const {
  const std::size_t pairs = cosines_.size();
  vector = vector.subspan(offset_);
  for (std::size_t i = 0; i < pairs; ++i)
    turn(vector[interleaved_ ? 2 * i : i], vector[interleaved_ ? 2 * i + 1 : i + pairs], cosines_[i], sines_[i]);
}

}  // namespace kvreplay
