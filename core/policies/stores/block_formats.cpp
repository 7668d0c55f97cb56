// Integer codes with scales (docs/stores.md): the block formats of ggml, with 32 numbers for a scale, and in those of
// type _1 a minimum, in float16; and formats of vLLM with a scale for each vector.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "policies/stores/number_format.h"

namespace kvreplay {
namespace {

using Block = std::span<float>;

/// 0 where the reciprocal is infinite: the scale is then 0 in float16.
float reciprocal(float scale) {
  const float inverse = 1.0F / scale;
  return std::isfinite(inverse) ? inverse : 0.0F;
}

/// Codes -127 ... 127.
void code_by_largest(Block block) {
  const float scale = largest_of(block) / 127.0F, inverse = reciprocal(scale);
  for (float& x : block) x = std::round(x * inverse) * rounded_to_float16(scale);
}

/// Codes 0 ... 2 half - 1. The number of the largest magnitude, the first of equal ones, has code 0.
void code_by_signed_largest(Block block, float half) {
  const float most = *std::ranges::max_element(block, {}, [](float x) { return std::abs(x); });
  const float scale = most / -half, inverse = reciprocal(scale);
  for (float& x : block) {
    const float code = std::min(2 * half - 1, std::trunc(x * inverse + (half + 0.5F)));
    x = (code - half) * rounded_to_float16(scale);
  }
}

/// Codes 0 ... levels, from the minimum on.
void code_from_minimum(Block block, float levels) {
  const auto [least, most] = std::ranges::minmax(block);
  const float scale = (most - least) / levels, inverse = reciprocal(scale);
  for (float& x : block) {
    const float code = std::min(levels, std::trunc((x - least) * inverse + 0.5F));
    x = code * rounded_to_float16(scale) + rounded_to_float16(least);
  }
}

struct BlockFormat {
  double block_bytes = 0;
  void (*code)(Block) = nullptr;

  void parameters(Parameters&) const {}
  NumberFormat format() const {
    return {.block = 32,
            .bytes = [of_block = block_bytes](int dim) { return of_block * dim / 32; },
            .coder = [coder = block_coder(32, code)](int) { return coder; }};
  }
};

const RegisteredFormat<BlockFormat> q8_0{
    "q8_0", "8-bit codes with a scale per 32 numbers (ggml)", {34, code_by_largest}};
const RegisteredFormat<BlockFormat> q5_1{"q5_1",
                                         "5-bit codes with scale and minimum per 32 numbers (ggml)",
                                         {24, [](Block block) { code_from_minimum(block, 31); }}};
const RegisteredFormat<BlockFormat> q5_0{"q5_0",
                                         "5-bit codes with a scale per 32 numbers (ggml)",
                                         {22, [](Block block) { code_by_signed_largest(block, 16); }}};
const RegisteredFormat<BlockFormat> q4_1{"q4_1",
                                         "4-bit codes with scale and minimum per 32 numbers (ggml)",
                                         {20, [](Block block) { code_from_minimum(block, 15); }}};
const RegisteredFormat<BlockFormat> q4_0{"q4_0",
                                         "4-bit codes with a scale per 32 numbers (ggml)",
                                         {18, [](Block block) { code_by_signed_largest(block, 8); }}};

struct Uniform {
  int bits = 4;

  void parameters(Parameters& p) { p.add("bits", bits, IntRange{.least = 1, .most = 8}, "bits per quantised number"); }
  NumberFormat format() const {
    return {.bytes = [of_number = bits](int dim) { return std::ceil(dim * of_number / 8.0) + 4; },
            .coder = [levels = static_cast<float>((1 << bits) - 1)](int) -> Coder {
              return [levels](std::span<float> vector, float) { code(vector, levels); };
            }};
  }
  static void code(std::span<float> vector, float levels) {
    constexpr float least_scale = 1e-8F;
    const auto [least, most] = std::ranges::minmax(vector);
    const float scale = std::max((most - least) / levels, least_scale);
    for (float& x : vector) {
      const float code = std::min(levels, std::trunc((x - least) / scale + 0.5F));
      x = code * rounded_to_float16(scale) + rounded_to_float16(least);
    }
  }
};

const RegisteredFormat<Uniform> uniform_codes{"uniform",
                                              "codes with scale and minimum per vector (values of vLLM's TurboQuant)"};

struct Int4PerTokenHead {
  void parameters(Parameters&) const {}
  NumberFormat format() const {
    return {.block = 2,
            .bytes = [](int dim) { return dim / 2.0 + 4; },
            .coder = [](int) -> Coder { return [](std::span<float> vector, float) { code(vector); }; }};
  }
  static void code(std::span<float> vector) {
    constexpr float levels = 15, least_scale = 1e-6F;
    const auto [least, most] = std::ranges::minmax(vector);
    const float scale = std::max((most - least) / levels, least_scale), inverse = 1.0F / scale;
    const float zero_point = code_of(-least / scale);
    const float stored = std::bit_cast<float>(std::bit_cast<std::uint32_t>(scale) & ~std::uint32_t{15});
    for (float& x : vector) x = (code_of(x * inverse + zero_point) - zero_point) * stored;
  }
  /// The nearest of 0 ... 15; ties away from zero.
  static float code_of(float number) {
    return std::clamp(std::trunc(number + std::copysign(0.5F, number)), 0.0F, 15.0F);
  }
};

const RegisteredFormat<Int4PerTokenHead> int4_per_token_head{
    "int4_per_token_head", "4-bit codes with a scale and a 4-bit zero point per vector (vLLM)"};

}  // namespace
}  // namespace kvreplay
