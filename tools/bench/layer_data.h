// Layers to measure on: random ones of a given shape, and those of a trace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attention/kept_set.h"
#include "tensor.h"
#include "trace/trace.h"

namespace kvreplay::bench {

/// A layer and all that its tensors point to.
struct LayerData {
  LayerTensors tensors;
  std::vector<std::byte> q, k, v;
  std::vector<std::int32_t> query_positions;
  std::shared_ptr<const Trace> trace;
};

/// Where a layer comes from; it is made when it is asked for.
struct LayerSource {
  std::string name;
  int query_heads = 0;
  int kv_heads = 0;
  int dim = 0;
  int tokens = 0;
  DType dtype = DType::float32;
  int first_query = 0;  // from here on all queries are stored
  std::function<std::shared_ptr<const LayerData>()> load;
};

struct RandomShape {
  int query_heads = 0;
  int kv_heads = 0;
  int dim = 0;
  int tokens = 0;
  DType dtype = DType::float32;
  int last_queries = 0;  // stored; 0: all
};

/// Uniform numbers of standard deviation 1.5: logits spread as far as those of models do. Its name is
/// "32-8-128/n:4096/float32": query heads, KV heads, dimensions.
LayerSource random_layer(const RandomShape& shape);

/// Its name is that of the trace and the number of the stored layer: "needle-12/n:512/bfloat16".
LayerSource trace_layer(const std::shared_ptr<const Trace>& trace, int layer);

inline constexpr int random_set_count = 65;

/// Kept sets of `tokens` tokens, drawn for each KV head: 13 each of some 5, 10, 20, 30 and 50 % of them.
std::vector<KeptSet> random_sets(int kv_heads, int tokens);

}  // namespace kvreplay::bench
