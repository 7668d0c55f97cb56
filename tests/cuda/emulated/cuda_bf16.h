#pragma once

#include "cuda_fp16.h"

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
