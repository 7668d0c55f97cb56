#include "attention/rope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <mutex>
#include <utility>

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
    : interleaved_(rope.interleaved),
      offset_(static_cast<std::size_t>(rope.offset)),
      angles_(angles_of(rope.inv_freq, farthest)) {}

std::shared_ptr<const BackwardRotation::Angles> BackwardRotation::angles_of(std::span<const double> frequencies,
                                                                            int farthest) {
  static std::mutex mutex;
  static std::array<std::shared_ptr<const Angles>, 2> tables;  // layers alternate between two of a model, at most
  const std::lock_guard lock(mutex);
  const auto same = [&](const auto& some) {
    return some != nullptr && std::ranges::equal(some->frequencies, frequencies);
  };
  if (!same(tables[0])) std::swap(tables[0], tables[1]);
  if (!same(tables[0])) {
    Angles none;
    none.frequencies.assign(frequencies.begin(), frequencies.end());
    tables[0] = std::make_shared<Angles>(std::move(none));
  }
  if (tables[0]->distances <= farthest) {
    Angles longer = *tables[0];
    longer.distances = std::max(farthest + 1, longer.distances + longer.distances / 4);  // requests grow step by step
    longer.cosines.reserve(static_cast<std::size_t>(longer.distances) * frequencies.size());
    longer.sines.reserve(static_cast<std::size_t>(longer.distances) * frequencies.size());
    for (int distance = tables[0]->distances; distance < longer.distances; ++distance) {
      for (const double frequency : frequencies) {
        const double angle = -distance * frequency;
        const double cosine = std::cos(angle), sine = std::sin(angle);  // side by side, they are computed together
        longer.cosines.push_back(cosine);
        longer.sines.push_back(sine);
      }
    }
    tables[0] = std::make_shared<Angles>(std::move(longer));
  }
  return tables[0];
}

template <class Number>
void BackwardRotation::turn_pairs(int distance, std::span<Number> vector) const {
  if (distance == 0) return;
  const std::size_t pairs = angles_->frequencies.size();
  vector = vector.subspan(offset_);
  const double* cosines = angles_->cosines.data() + static_cast<std::size_t>(-distance) * pairs;
  const double* sines = angles_->sines.data() + static_cast<std::size_t>(-distance) * pairs;
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
