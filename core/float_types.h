// Stored floats to float and back, one at a time: exact to float, round-to-nearest-even from it.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "tensor.h"

namespace kvreplay {

constexpr float from_float16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000U) << 16, exponent = (half >> 10) & 0x1FU, mantissa = half & 0x3FFU;
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000U | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float subnormal = static_cast<float>(mantissa) * 0x1p-24F;
  return sign != 0 ? -subnormal : subnormal;
}

constexpr std::uint16_t to_float16(float number) {
  const auto bits = std::bit_cast<std::uint32_t>(number);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  const auto with_sign = [&](std::uint32_t rest) { return static_cast<std::uint16_t>(sign | rest); };
  if (magnitude > 0x7F800000U) return with_sign(0x7E00U);   // NaN
  if (magnitude >= 0x477FF000U) return with_sign(0x7C00U);  // rounds beyond 65504
  if (magnitude >= 0x38800000U) return with_sign((magnitude - 0x38000000U + 0x0FFFU + ((magnitude >> 13) & 1U)) >> 13);
  // Subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the last bits.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
  return with_sign(std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U);
}

constexpr float from_bfloat16(std::uint16_t brain) { return std::bit_cast<float>(std::uint32_t{brain} << 16); }

constexpr std::uint16_t to_bfloat16(float number) {
  const auto bits = std::bit_cast<std::uint32_t>(number);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);  // NaN
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

/// Element i of an array of stored elements.
inline float load(const std::byte* elements, DType type, std::size_t i) {
  if (type == DType::float32) {
    float number;
    std::memcpy(&number, elements + 4 * i, 4);
    return number;
  }
  std::uint16_t bits;
  std::memcpy(&bits, elements + 2 * i, 2);
  return type == DType::float16 ? from_float16(bits) : from_bfloat16(bits);
}

/// Elements of a tensor of this shape, [heads, tokens, dim], as a tensor.
inline TensorView view_of(const std::vector<float>& elements, const TensorView& shape) {
  return {reinterpret_cast<const std::byte*>(elements.data()), DType::float32, shape.heads, shape.tokens, shape.dim};
}

/// [dim] of them.
inline std::span<float> row_of(std::vector<float>& elements, const TensorView& shape, int head, int token) {
  const auto dim = static_cast<std::size_t>(shape.dim);
  const std::size_t row =
      static_cast<std::size_t>(head) * static_cast<std::size_t>(shape.tokens) + static_cast<std::size_t>(token);
  return std::span(elements).subspan(row * dim, dim);
}

/// The first vector.size() elements of a stored row.
inline void read_row(const TensorView& tensor, int head, int row, std::span<double> vector) {
  const std::byte* const stored = tensor.row(head, row);
  for (std::size_t i = 0; i < vector.size(); ++i) vector[i] = static_cast<double>(load(stored, tensor.dtype, i));
}

/// All elements of a tensor, [heads, tokens, dim].
inline std::vector<float> widened(const TensorView& tensor) {
  std::vector<float> elements(static_cast<std::size_t>(tensor.heads) * static_cast<std::size_t>(tensor.tokens) *
                              static_cast<std::size_t>(tensor.dim));
  const auto dim = static_cast<std::size_t>(tensor.dim), row_count = elements.size() / dim;
  const std::size_t row_bytes = tensor.stride_bytes();
  for (std::size_t row = 0; row < row_count; ++row)
    for (std::size_t c = 0; c < dim; ++c)
      elements[row * dim + c] = load(tensor.data + row * row_bytes, tensor.dtype, c);
  return elements;
}

inline void store(std::byte* elements, DType type, std::size_t i, float number) {
  if (type == DType::float32) {
    std::memcpy(elements + 4 * i, &number, 4);
    return;
  }
  const std::uint16_t bits = type == DType::float16 ? to_float16(number) : to_bfloat16(number);
  std::memcpy(elements + 2 * i, &bits, 2);
}

}  // namespace kvreplay
