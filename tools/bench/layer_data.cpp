#include "layer_data.h"

#include <fmt/format.h>

#include <cmath>

#include "benchmark_case.h"
#include "positions.h"
#include "random.h"
#include "trace/float_types.h"

namespace kvreplay::bench {
namespace {

std::vector<std::byte> random_elements(const RandomShape& shape, int heads, int tokens, std::uint64_t seed) {
  const std::size_t count =
      static_cast<std::size_t>(heads) * static_cast<std::size_t>(tokens) * static_cast<std::size_t>(shape.dim);
  std::vector<std::byte> elements(count * size_of(shape.dtype));
  const double reach = 1.5 * std::sqrt(3.0);
#pragma omp parallel for schedule(static)
  for (std::size_t i = 0; i < count; ++i)
    store(elements.data(), shape.dtype, i, static_cast<float>(reach * (2.0 * uniform(mix(seed << 40 ^ i)) - 1.0)));
  return elements;
}

LayerData make(const RandomShape& shape) {
  LayerData layer;
  const int queries = shape.last_queries > 0 ? shape.last_queries : shape.tokens;
  if (queries < shape.tokens) layer.query_positions = position_range(shape.tokens - queries, shape.tokens);
  layer.q = random_elements(shape, shape.query_heads, queries, 1);
  layer.k = random_elements(shape, shape.kv_heads, shape.tokens, 2);
  layer.v = random_elements(shape, shape.kv_heads, shape.tokens, 3);
  layer.tensors = {.q = {layer.q.data(), shape.dtype, shape.query_heads, queries, shape.dim},
                   .k = {layer.k.data(), shape.dtype, shape.kv_heads, shape.tokens, shape.dim},
                   .v = {layer.v.data(), shape.dtype, shape.kv_heads, shape.tokens, shape.dim},
                   .query_positions = layer.query_positions,
                   .softmax_scale = 1.0F / std::sqrt(static_cast<float>(shape.dim)),
                   .rope = {}};
  return layer;
}

}  // namespace

LayerSource random_layer(const RandomShape& shape) {
  static Latest<LayerData> latest;
  const std::string name =
      fmt::format("{}-{}-{}/n:{}/{}", shape.query_heads, shape.kv_heads, shape.dim, shape.tokens, name_of(shape.dtype));
  return {name, shape.query_heads, shape.kv_heads, shape.dim, shape.tokens, shape.dtype, [shape, name] {
            return latest.get(fmt::format("{}/{}", name, shape.last_queries), [&] { return make(shape); });
          }};
}

LayerSource trace_layer(const std::shared_ptr<const Trace>& trace, int layer) {
  const TraceHeader& header = trace->header();
  const LayerTensors tensors = trace->layer(layer);
  return {fmt::format("{}-{}/n:{}/{}", trace->name(), layer, header.tokens(), name_of(tensors.k.dtype)),
          header.query_heads,
          header.kv_heads,
          header.head_dim,
          header.tokens(),
          tensors.k.dtype,
          [trace, layer] {
            auto data = std::make_shared<LayerData>();
            data->tensors = trace->layer(layer);
            data->trace = trace;
            return std::shared_ptr<const LayerData>(std::move(data));
          }};
}

}  // namespace kvreplay::bench
