// Tensors of a trace as they lie in the file: 16- or 32-bit floats, never copied before they are used.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace kvreplay {

enum class DType { float16, bfloat16, float32 };

constexpr std::size_t size_of(DType type) { return type == DType::float32 ? 4 : 2; }
constexpr const char* name_of(DType type) {
  return type == DType::float16 ? "float16" : type == DType::bfloat16 ? "bfloat16" : "float32";
}

/// [heads, tokens, dim] at any byte address: small tensors lie in a file wherever there was room. Rows are contiguous,
/// or the first components of longer rows. Lives as long as what it was taken from.
struct TensorView {
  const std::byte* data = nullptr;
  DType dtype = DType::float32;
  int heads = 0;
  int tokens = 0;
  int dim = 0;
  int stride = 0;  // numbers from one row to the next; 0: dim

  bool is_contiguous() const { return stride == 0 || stride == dim; }
  std::size_t row_bytes() const { return static_cast<std::size_t>(dim) * size_of(dtype); }
  std::size_t stride_bytes() const { return static_cast<std::size_t>(stride == 0 ? dim : stride) * size_of(dtype); }
  /// From the first row to the last, with the numbers between them.
  std::size_t bytes() const {
    return static_cast<std::size_t>(heads) * static_cast<std::size_t>(tokens) * stride_bytes();
  }
  const std::byte* row(int head, int token) const {
    return data +
           (static_cast<std::size_t>(head) * static_cast<std::size_t>(tokens) + static_cast<std::size_t>(token)) *
               stride_bytes();
  }
  /// [count, tokens, dim]: the heads from `first` on.
  TensorView heads_from(int first, int count = 1) const {
    TensorView some = *this;
    some.data = row(first, 0);
    some.heads = count;
    return some;
  }
};

/// Rotary position embedding of one layer: pair i of the components from `offset` on turns by position * inv_freq[i]
/// radians.
struct Rope {
  std::span<const double> inv_freq;  // [r]; empty or all zero: this layer has no RoPE
  double attention_scaling = 1.0;    // already applied to stored queries and keys
  bool interleaved = false;          // pairs (2i, 2i+1) instead of (i, i+r)
  int offset = 0;                    // of the first component of a pair from that of the vector
};

/// What a model with sparse attention of its own lets each query read.
struct VisibleUnits {
  std::span<const std::int32_t> units;  // [Hkv, Tq, u] of each query, ascending, then -1; empty: every token
  int tokens = 0;                       // B: unit i is tokens [iB, iB + B)

  /// Those of stored query i of a KV head.
  std::span<const std::int32_t> of(int kv_head, int i, const TensorView& q, int kv_heads) const {
    const std::size_t rows = static_cast<std::size_t>(kv_heads) * static_cast<std::size_t>(q.tokens);
    const std::size_t row =
        static_cast<std::size_t>(kv_head) * static_cast<std::size_t>(q.tokens) + static_cast<std::size_t>(i);
    const std::span<const std::int32_t> all = units.subspan(row * (units.size() / rows), units.size() / rows);
    return all.first(static_cast<std::size_t>(std::ranges::find(all, -1) - all.begin()));
  }
};

/// One layer's tensors and the rules of its attention.
struct LayerTensors {
  TensorView q;                                   // [Hq, Tq, d]
  TensorView k;                                   // [Hkv, T, d]
  TensorView v;                                   // [Hkv, T, dv]
  std::span<const std::int32_t> query_positions;  // [Tq] ascending; empty: query i stands at position i
  float softmax_scale = 1.0F;
  float logit_softcap = 0.0F;  // c: logits become c * tanh(z / c); 0: none
  int sliding_window = 0;      // W: query t sees keys j > t - W; 0: all
  bool value_is_key = false;   // v has the first components of k
  int chunk = 0;               // C: query t sees keys j >= floor(t / C) C; 0: all
  /// [Hq] s: the softmax of a query head has one more term, exp(s), which belongs to no key; -infinity or empty: none.
  std::span<const double> sinks = {};
  Rope rope;
  VisibleUnits visible = {};  // the model's own selection: full attention does not follow it

  int group() const { return q.heads / k.heads; }  // query heads that read one KV head
  /// Bytes of one token and KV head in a cache.
  std::size_t token_bytes() const { return k.row_bytes() + (value_is_key ? 0 : v.row_bytes()); }
  /// Position of the first key that the query at `position` sees.
  int first_visible(int position) const {
    const int of_window = sliding_window > 0 ? position - sliding_window + 1 : 0;
    return std::max({0, of_window, chunk > 0 ? position / chunk * chunk : 0});
  }
  /// Position after the last query that sees the key at `position`.
  int end_of_queries(int position) const {
    constexpr int all = std::numeric_limits<int>::max();
    const int of_window = sliding_window > 0 && position < all - sliding_window ? position + sliding_window : all;
    return std::min(of_window, chunk > 0 && position < all - chunk ? (position / chunk + 1) * chunk : all);
  }
  double sink(int query_head) const {
    return sinks.empty() ? -std::numeric_limits<double>::infinity() : sinks[static_cast<std::size_t>(query_head)];
  }
};

}  // namespace kvreplay
