#include "attention/rope.h"

#include <algorithm>
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

void BackwardRotation::cover(const Rope& rope, int farthest) {
  interleaved_ = rope.interleaved;
  offset_ = static_cast<std::size_t>(rope.offset);
  if (!std::ranges::equal(frequencies_, rope.inv_freq)) {
    frequencies_.assign(rope.inv_freq.begin(), rope.inv_freq.end());
    cosines_.clear();
    sines_.clear();
    distances_ = 0;
  }
  for (; distances_ <= farthest; ++distances_) {
    for (const double frequency : frequencies_) {
      cosines_.push_back(std::cos(-distances_ * frequency));
      sines_.push_back(std::sin(-distances_ * frequency));
    }
  }
}

template <class Number>
void BackwardRotation::turn_pairs(int distance, std::span<Number> vector) const {
  if (distance == 0) return;
  const std::size_t pairs = frequencies_.size();
  vector = vector.subspan(offset_);
  const double* cosines = cosines_.data() + static_cast<std::size_t>(-distance) * pairs;
  const double* sines = sines_.data() + static_cast<std::size_t>(-distance) * pairs;
  if (interleaved_) {
    for (std::size_t i = 0; i < pairs; ++i) turn(vector[2 * i], vector[2 * i + 1], cosines[i], sines[i]);
  } else {
    for (std::size_t i = 0; i < pairs; ++i) turn(vector[i], vector[i + pairs], cosines[i], sines[i]);
  }
}

void BackwardRotation::apply(int distance, std::span<float> vector) const { turn_pairs(distance, vector); }
void BackwardRotation::apply(int distance, std::span<double> vector) const { turn_pairs(distance, vector); }

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
