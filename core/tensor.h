// Tensors of a trace as they lie in the file: 16- or 32-bit floats, never copied before they are used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvreplay {

enum class DType { float16, bfloat16, float32 };

constexpr std::size_t size_of(DType type) { return type == DType::float32 ? 4 : 2; }
constexpr const char* name_of(DType type) {
  return type == DType::float16 ? "float16" : type == DType::bfloat16 ? "bfloat16" : "float32";
}

/// [heads, tokens, dim], contiguous, at any byte address: small tensors lie in a file wherever there was room. Lives as
/// long as what it was taken from.
struct TensorView {
  const std::byte* data = nullptr;
  DType dtype = DType::float32;
  int heads = 0;
  int tokens = 0;
  int dim = 0;

  std::size_t row_bytes() const { return static_cast<std::size_t>(dim) * size_of(dtype); }
  std::size_t bytes() const { return static_cast<std::size_t>(heads) * static_cast<std::size_t>(tokens) * row_bytes(); }
  const std::byte* row(int head, int token) const {
    return data +
           (static_cast<std::size_t>(head) * static_cast<std::size_t>(tokens) + static_cast<std::size_t>(token)) *
               row_bytes();
  }
};

/// Rotary position embedding of one layer: pair i turns by position * inv_freq[i] radians.
struct Rope {
  std::span<const double> inv_freq;  // [r]; empty or all zero: this layer has no RoPE
  double attention_scaling = 1.0;    // already applied to stored queries and keys
  bool interleaved = false;          // pairs (2i, 2i+1) instead of (i, i+r)
};

/// One layer's tensors and the rules of its attention.
struct LayerTensors {
  TensorView q;                                   // [Hq, Tq, d]
  TensorView k;                                   // [Hkv, T, d]
  TensorView v;                                   // [Hkv, T, d]
  std::span<const std::int32_t> query_positions;  // [Tq] ascending; empty: query i stands at position i
  float softmax_scale = 1.0F;
  float logit_softcap = 0.0F;  // c: logits become c * tanh(z / c); 0: none
  int sliding_window = 0;      // W: query t sees keys j > t - W; 0: all
  Rope rope;

  int group() const { return q.heads / k.heads; }  // query heads that read one KV head
};

}  // namespace kvreplay
