#pragma once

// CUDA's half and bfloat16 numbers: IEEE 754 binary16, and the upper half of binary32; conversions round to the
// nearest, ties to even.

#include <bit>
#include <cstdint>

#include "vector_types.h"

namespace emulated {

// Branches only on what loops over whole fragments keep as selections.
inline float half_to_float(std::uint16_t half) {
  const std::uint32_t magnitude = (half & 0x7FFFu) << 13;
  std::uint32_t bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  bits |= (half & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;
  return std::bit_cast<float>(bits | (half & 0x8000u) << 16);
}

inline std::uint16_t float_to_half(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7FFF;
  if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);  // 65520 and more
  if (magnitude < 0x38800000u) {  // below 2^-14; the unit of 0.5's last place is the subnormals'
    const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(rounded) - 0x3F000000u));
  }
  return static_cast<std::uint16_t>(sign | (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13);
}

inline float bfloat16_to_float(std::uint16_t value) { return std::bit_cast<float>(std::uint32_t{value} << 16); }

inline std::uint16_t float_to_bfloat16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
  return static_cast<std::uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace emulated

struct __half {
  __half() = default;
  __half(float value) : bits_(emulated::float_to_half(value)) {}
  operator float() const { return emulated::half_to_float(bits_); }
  std::uint16_t bits_;
};
struct alignas(4) __half2 {
  __half x, y;
};
using half = __half;
using half2 = __half2;

inline float __half2float(__half value) { return value; }
inline __half __float2half(float value) { return value; }
inline __half __float2half_rn(float value) { return value; }
inline unsigned short __half_as_ushort(__half value) { return value.bits_; }
inline __half __ushort_as_half(unsigned short bits) { return std::bit_cast<__half>(bits); }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 value) { return {value.x, value.y}; }
inline float2 __half22float2(__half2 value) { return {value.x, value.y}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline float __low2float(__half2 value) { return value.x; }
inline float __high2float(__half2 value) { return value.y; }

struct __nv_bfloat16 {
  __nv_bfloat16() = default;
  __nv_bfloat16(float value) : bits_(emulated::float_to_bfloat16(value)) {}
  operator float() const { return emulated::bfloat16_to_float(bits_); }
  std::uint16_t bits_;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline float __bfloat162float(__nv_bfloat16 value) { return value; }
inline __nv_bfloat16 __float2bfloat16(float value) { return value; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return value; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits_; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return std::bit_cast<__nv_bfloat16>(bits); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 value) { return {value.x, value.y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 value) { return {value.x, value.y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline float __low2float(__nv_bfloat162 value) { return value.x; }
inline float __high2float(__nv_bfloat162 value) { return value.y; }
