#include "layer_data.h"

#include <fmt/format.h>

#include <cmath>
#include <iterator>

#include "benchmark_case.h"
#include "error.h"
#include "float_types.h"
#include "positions.h"
#include "random.h"

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

/// Brings a mapped layer into memory, so that what a call adds to it is its own.
void touch(const LayerTensors& layer) {
  constexpr std::size_t page = 4096;
  for (const TensorView& tensor : {layer.q, layer.k, layer.v}) {
    const volatile std::byte* bytes = tensor.row(0, 0);
    for (std::size_t i = 0; i < tensor.bytes(); i += page) static_cast<void>(bytes[i]);
  }
}

}  // namespace

LayerSource random_layer(const RandomShape& shape) {
  static Latest<LayerData> latest;
  const std::string name =
      fmt::format("{}-{}-{}/n:{}/{}", shape.query_heads, shape.kv_heads, shape.dim, shape.tokens, name_of(shape.dtype));
  return {name,
          shape.query_heads,
          shape.kv_heads,
          shape.dim,
          shape.tokens,
          shape.dtype,
          shape.last_queries > 0 ? shape.tokens - shape.last_queries : 0,
          [shape, name] {
            return latest.get(fmt::format("{}/{}", name, shape.last_queries), [&] { return make(shape); });
          }};
}

LayerSource trace_layer(const std::shared_ptr<const Trace>& trace, int layer) {
  const TraceHeader& header = trace->header();
  if (layer < 0 || layer >= header.layers)
    throw Error{Refusal::usage, "--layers", "no such layer", fmt::format("0 ... {}", header.layers - 1),
                std::to_string(layer)};
  const LayerTensors tensors = trace->layer(layer);
  if (tensors.sliding_window > 0 || tensors.logit_softcap > 0.0F)
    throw Error{Refusal::usage, "--layers", fmt::format("layer {}", layer), "one without sliding window and soft cap",
                "one with"};
  int first_query = header.tokens();
  if (tensors.query_positions.empty()) first_query = 0;
  for (std::size_t i = tensors.query_positions.size(); i > 0 && tensors.query_positions[i - 1] == first_query - 1; --i)
    --first_query;
  return {fmt::format("{}-{}/n:{}/{}", trace->name(), layer, header.tokens(), name_of(tensors.k.dtype)),
          header.query_heads,
          header.kv_heads,
          header.head_dim,
          header.tokens(),
          tensors.k.dtype,
          first_query,
          [trace, layer] {
            auto data = std::make_shared<LayerData>();
            data->tensors = trace->layer(layer);
            data->trace = trace;
            touch(data->tensors);
            return std::shared_ptr<const LayerData>(std::move(data));
          }};
}

std::vector<KeptSet> random_sets(int kv_heads, int tokens) {
  constexpr double shares[] = {0.05, 0.1, 0.2, 0.3, 0.5};
  std::vector<KeptSet> sets(random_set_count, KeptSet(Heads::kv, kv_heads, tokens));
  for (std::size_t number = 0; number < sets.size(); ++number)
    for (int head = 0; head < kv_heads; ++head)
      for (int token = 0; token < tokens; ++token)
        if (uniform(chain(number, head, token)) < shares[number * std::size(shares) / sets.size()])
          sets[number].keep(head, token);
  return sets;
}

}  // namespace kvreplay::bench
