// A trace with everything in it that the format knows, small enough to be read thousands of times a second.
#pragma once

#include <cstddef>
#include <filesystem>
#include <vector>

#include "survival.h"
#include "trace/trace.h"
#include "trace/writer.h"

namespace kvreplay {

constexpr int small_trace_tokens = 24;

/// Two layers, the first with an output projection, the second with so many of its last queries; text and spans.
inline void write_small_trace(const std::filesystem::path& path, int last_queries = small_trace_tokens) {
  TraceHeader header;
  header.producer = "fuzz";
  header.model = "none";
  header.architecture = "none";
  header.synthetic = true;
  header.layers = 2;
  header.query_heads = 4;
  header.kv_heads = 2;
  header.head_dim = 4;
  header.softmax_scale = 0.5;
  header.source_hash = "0";
  header.sliding_window = {0, 0};
  header.layer_index = {0, 3};
  header.has_rope = true;
  header.rope_pairs = 2;
  header.inv_freq = {1.0, 0.25, 1.0, 0.25};
  header.attention_scaling = {1.0, 1.0};
  header.prefill = 20;
  constexpr int tokens = small_trace_tokens;
  for (int t = 0; t < tokens; ++t) {
    header.ids.push_back(7 * t % 11);
    header.offsets.insert(header.offsets.end(), {t, t + 1});
    header.text += "é";
  }
  header.spans = {{"context", "context", 2, 12}, {"question", "question", 14, 18}};

  const auto rows = [](int count, int size) {
    std::vector<float> numbers;
    for (int i = 0; i < count * size; ++i) numbers.push_back(static_cast<float>((i * 37 + 11) % 33 - 16) / 8.0F);
    const auto* raw = reinterpret_cast<const std::byte*>(numbers.data());
    return std::vector<std::byte>(raw, raw + numbers.size() * sizeof(float));
  };
  TraceWriter writer(path, header, Existing::replace);
  for (int layer = 0; layer < header.layers; ++layer) {
    const int queries = layer == 0 ? tokens : last_queries;
    std::vector<std::int32_t> positions;
    for (int t = tokens - queries; queries < tokens && t < tokens; ++t) positions.push_back(t);
    writer.begin_layer(DType::float32, positions);
    writer.append_q(rows(header.query_heads * queries, header.head_dim));
    writer.append_k(rows(header.kv_heads * tokens, header.head_dim));
    writer.append_v(rows(header.kv_heads * tokens, header.head_dim));
    if (layer > 0) continue;
    const int width = header.query_heads * header.head_dim;
    writer.begin_tensor("/layers/000/wo", DType::float32, {3, static_cast<std::uint64_t>(width)});
    writer.write_tokens("/layers/000/wo", 0, rows(3, width));
  }
  writer.finish();
}

/// That trace, open.
class SmallTrace {
 public:
  SmallTrace() : trace_(made(folder_ / "small.h5")) {}
  const Trace& operator*() const { return trace_; }

 private:
  static Trace made(const std::filesystem::path& path) {
    write_small_trace(path);
    return Trace::open(path);
  }

  OwnFolder folder_;
  Trace trace_;
};

}  // namespace kvreplay
