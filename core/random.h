// Counter-based random numbers: the same number for the same coordinates, in any order and on any machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace kvreplay {

/// The finaliser of SplitMix64 (Steele, Lea and Flood 2014) on z + the golden ratio; arithmetic mod 2^64.
constexpr std::uint64_t mix(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

/// chain(x0, ..., xn, x) where `chain` is chain(x0, ..., xn).
constexpr std::uint64_t chained(std::uint64_t chain, std::uint64_t x) { return mix(chain ^ x); }

/// chain(x0, x1, ...) = mix(... mix(mix(x0) ^ x1) ^ x2 ...).
template <class... Rest>
constexpr std::uint64_t chain(std::uint64_t first, Rest... rest) {
  std::uint64_t state = mix(first);
  ((state = chained(state, static_cast<std::uint64_t>(rest))), ...);
  return state;
}

/// In (0, 1).
constexpr double uniform(std::uint64_t u) { return (static_cast<double>(u >> 11) + 0.5) * 0x1p-53; }

/// Standard normal from two independent chains (Box and Muller 1958).
inline double gaussian(std::uint64_t u1, std::uint64_t u2) {
  return std::sqrt(-2.0 * std::log(uniform(u1))) * std::cos(2.0 * std::numbers::pi * uniform(u2));
}

static_assert(chain(0) == 0xE220A8397B1DCDAFu);
static_assert(chain(1, 0, 0, 0, 0) == 0x348C3D1AF8BEC8E5u);

}  // namespace kvreplay
