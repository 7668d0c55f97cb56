// Sums over the keys that a row holds, and the moments that they make: the same for all backends, on the machine and on
// a device.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>

#include "attention/backend.h"

namespace kvreplay {

/// Bits [begin, end) of a word.
template <std::unsigned_integral Word>
constexpr Word bits_between(int begin, int end) {
  constexpr int bits = static_cast<int>(8 * sizeof(Word));
  begin = std::max(begin, 0);
  end = std::min(end, bits);
  return begin >= end ? Word{0} : static_cast<Word>(static_cast<Word>(~Word{0} >> (bits - (end - begin))) << begin);
}

/// Of the keys from `key` on, one a bit: those of [begin, end) that a query holds. `kept`: what its set keeps, which
/// covers [0, tokens); the query's own key is `own`.
template <std::unsigned_integral Word>
constexpr Word held_keys(Word kept, int key, int tokens, int own, int begin, int end) {
  constexpr int bits = static_cast<int>(8 * sizeof(Word));
  const Word held = kept | bits_between<Word>(tokens - key, bits) | bits_between<Word>(own - key, own - key + 1);
  return held & bits_between<Word>(begin - key, end - key);
}

/// Weight of a sink logit beside a reference, both in units of log 2. Where the sink has all but nothing left over for
/// the keys, their shares are those of a sink at the bound: 2^-1000. Kernels call constexpr functions alone; without a
/// constexpr std::exp2 only a template can be one.
template <std::floating_point Number>
constexpr Number sink_weight(Number sink, Number reference) {
  return std::exp2(std::min(sink - reference, Number{1000}));
}

/// Weights of float64 below this share of the largest count as 0: the square of one that counts is a normal number.
inline constexpr double least_weight = 0x1p-500;

/// Σ x and Σ x² over some keys.
struct MaskedSums {
  double sum = 0;
  double square = 0;
};

/// Sums of one row over the keys that it sees and a set holds.
struct RowSums {
  MaskedSums sinks, rest, later;  // of the first tokens, of the others below the boundary, from it on
  double logit_square = 0;        // of x, the logit in units of log 2, below the boundary
  double unaligned_dot = 0;
  double sink_logit = 0;  // weight of the head's sink logit, which every set holds

  constexpr double keys() const { return sinks.sum + rest.sum + later.sum; }
  constexpr double total() const { return keys() + sink_logit; }
};

/// What sums of exponentials say. `unit` is that of the set's sums, those of everything being in units of 1.
constexpr Moments moments_of(const RowSums& set, const RowSums& full, double unit) {
  const double factor = unit / full.total();
  const double square_factor = factor * factor;
  Moments moments;
  // Written as a quotient, for a set that keeps everything to have exactly 1 without a sink logit.
  moments.mass = set.keys() * unit / full.total();
  moments.prompt_mass = (set.sinks.sum + set.rest.sum) * factor;
  moments.nosink_mass = set.rest.sum * factor;
  moments.square = (set.sinks.square + set.rest.square + set.later.square) * square_factor;
  moments.prompt_square = (set.sinks.square + set.rest.square) * square_factor;
  moments.nosink_square = set.rest.square * square_factor;
  return moments;
}

}  // namespace kvreplay
