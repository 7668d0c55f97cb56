// Floating-point formats of 8 and 4 bits, with scales of tensors, heads, tokens or groups (docs/stores.md).
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "policies/stores/number_format.h"

namespace kvreplay {
namespace {

struct SmallFloat {
  int mantissa_bits;
  int least_exponent;  // of normal numbers
  float most;
};

constexpr SmallFloat e4m3{3, -6, 448}, e5m2{2, -14, 57344}, e2m1{1, 0, 6};

/// The nearest number of the format, ties to even, after clamping to its range.
float rounded(float number, const SmallFloat& format) {
  if (number == 0 || std::isnan(number)) return number;
  const float clamped = std::clamp(number, -format.most, format.most);
  const int exponent = std::max(format.least_exponent, std::ilogb(clamped)) - format.mantissa_bits;
  return std::ldexp(std::rint(std::ldexp(clamped, -exponent)), exponent);
}

struct Float8 {
  enum class Scale { tensor, head, token, one };
  static constexpr Choice<Scale> words[] = {
      {"tensor", Scale::tensor}, {"head", Scale::head}, {"token", Scale::token}, {"one", Scale::one}};

  SmallFloat type;
  Scale scale = Scale::tensor;

  void parameters(Parameters& p) {
    p.add<Scale>("scale", scale, words,
                 "numbers that share a scale: a layer's keys or values, those of a KV head, or of a token in a head; "
                 "one: no scaling");
  }
  NumberFormat format() const {
    using Range = NumberFormat::Range;
    const bool per_token = scale == Scale::token;
    return {.range = per_token              ? Range::vector
                     : scale == Scale::head ? Range::head
                                            : Range::tensor,
            .range_bytes = per_token ? 0.0 : 4.0,
            .bytes = [per_token](int dim) { return dim + (per_token ? 4.0 : 0.0); },
            .coder = [part = *this](int) -> Coder {
              return [part](std::span<float> vector, float largest) { part.code(vector, largest); };
            }};
  }
  void code(std::span<float> vector, float largest) const {
    constexpr float least_of_token = 1e-6F;
    const float full = largest / type.most;
    const float s = scale == Scale::one ? 1.0F : scale == Scale::token ? std::max(full, least_of_token) : full;
    const float inverse = 1.0F / s;
    for (float& x : vector) {
      const float scaled = s == 0 ? 0.0F : scale == Scale::token ? x * inverse : x / s;
      x = rounded(scaled, type) * s;
    }
  }
};

const RegisteredFormat<Float8> fp8_e4m3{"fp8_e4m3", "float8 with 4 exponent and 3 mantissa bits", {e4m3}};
const RegisteredFormat<Float8> fp8_e5m2{"fp8_e5m2", "float8 with 5 exponent and 2 mantissa bits", {e5m2}};

struct Nvfp4 {
  static constexpr std::size_t group = 16;

  void parameters(Parameters&) const {}
  NumberFormat format() const {
    return {.block = group,
            .range = NumberFormat::Range::tensor,
            .range_bytes = 4,
            .bytes = [](int dim) { return dim / 2.0 + dim / 16.0; },
            .coder = [](int) -> Coder {
              return [](std::span<float> vector, float largest) {
                const float g = e4m3.most * e2m1.most / largest;
                block_coder(group, [g](std::span<float> block) { code(block, g); })(vector, largest);
              };
            }};
  }
  /// `g`: of the tensor. An infinite one has no float32 reciprocal, and its numbers are below 1e-35.
  static void code(std::span<float> block, float g) {
    const float s = std::isinf(g) ? 0.0F : rounded(g * (largest_of(block) * (1.0F / 6.0F)), e4m3);
    const float inverse = s == 0 ? 0.0F : 1.0F / (s * (1.0F / g)), step = s == 0 ? 0.0F : s / g;
    for (float& x : block) x = rounded(x * inverse, e2m1) * step;
  }
};

const RegisteredFormat<Nvfp4> nvfp4{
    "nvfp4", "4-bit floats with a float8 scale per 16 numbers and a float32 scale per layer (NVIDIA)"};

struct Mxfp4 {
  static constexpr std::size_t group = 32;

  void parameters(Parameters&) const {}
  NumberFormat format() const {
    return {.block = group,
            .bytes = [](int dim) { return 17.0 * dim / 32; },
            .coder = [](int) { return block_coder(group, code); }};
  }
  static void code(std::span<float> block) {
    constexpr float magnitudes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
    const float largest = largest_of(block);
    const float exponent = largest > 0 ? std::max(-127.0F, std::floor(std::log2(largest)) - 2) : -127.0F;
    const float scale = std::ldexp(1.0F, static_cast<int>(exponent));
    for (float& x : block) {
      const auto distance = [&](float magnitude) { return std::abs(magnitude * scale - std::abs(x)); };
      // Of two at equal distance the first one is the smaller one, as in ggml.
      x = std::copysign(*std::ranges::min_element(magnitudes, {}, distance) * scale, x);
    }
  }
};

const RegisteredFormat<Mxfp4> mxfp4{"mxfp4", "4-bit floats with a power of two per 32 numbers (OCP MX, as in ggml)"};

}  // namespace
}  // namespace kvreplay
