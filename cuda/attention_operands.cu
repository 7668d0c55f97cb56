#include <algorithm>
#include <numbers>

#include "cuda/attention_operands.h"
#include "cuda/attention_rows.h"
#include "cuda/launch.h"
#include "cuda/stored_types.h"
#include "cuda/widened.h"

namespace kvreplay {
namespace {

/// out[i] = in[rows[i]], rows of `pieces` times 16 bytes.
__global__ void gather_rows(const uint4* in, const int* rows, int count, int pieces, uint4* out) {
  const std::size_t at = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  const auto row = static_cast<int>(at / static_cast<std::size_t>(pieces));
  const auto piece = static_cast<int>(at % static_cast<std::size_t>(pieces));
  if (row >= count) return;
  const int from = rows[row];
  out[at] =
      from < 0
          ? uint4{0, 0, 0, 0}
          : in[static_cast<std::size_t>(from) * static_cast<std::size_t>(pieces) + static_cast<std::size_t>(piece)];
}

struct RopeTurn {
  const double* frequencies;
  int pairs;
  bool interleaved;
  int offset;
};

/// out[i] = in[rows[i]] (null: in[i]) in float32, turned by moves[i] positions (null: none); angles in float64.
template <class Element>
__global__ void widen_rows(const Element* in, const int* rows, const int* moves, RopeTurn rope, int count, int depth,
                           float* out) {
  const std::size_t at = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  const auto row = static_cast<int>(at / static_cast<std::size_t>(depth));
  const auto c = static_cast<int>(at % static_cast<std::size_t>(depth));
  if (row >= count) return;
  const int from = rows != nullptr ? rows[row] : row;
  if (from < 0) {
    out[at] = 0.0F;
    return;
  }
  const Element* vector = in + static_cast<std::size_t>(from) * static_cast<std::size_t>(depth);
  const int moved = moves != nullptr ? moves[row] : 0;
  const int turned = c - rope.offset;
  if (moved == 0 || turned < 0 || turned >= 2 * rope.pairs) {
    out[at] = widened(vector[c]);
    return;
  }
  const int pair = rope.interleaved ? turned / 2 : turned % rope.pairs;
  const bool first = rope.interleaved ? turned % 2 == 0 : turned < rope.pairs;
  const Element* of_pair = vector + rope.offset + (rope.interleaved ? 2 * pair : pair);
  const double x = static_cast<double>(widened(of_pair[0]));
  const double y = static_cast<double>(widened(of_pair[rope.interleaved ? 1 : rope.pairs]));
  const double angle = static_cast<double>(moved) * rope.frequencies[pair];
  out[at] = static_cast<float>(first ? x * cos(angle) - y * sin(angle) : x * sin(angle) + y * cos(angle));
}

constexpr int threads = 256;

void widen(DType dtype, const void* in, const int* rows, const int* moves, const RopeTurn& rope, int count, int depth,
           float* out, cudaStream_t stream) {
  const dim3 blocks(blocks_for(static_cast<std::size_t>(count) * static_cast<std::size_t>(depth), threads));
  with_element(dtype, [&]<class Element>() {
    launch(widen_rows<Element>, blocks, threads, 0, stream, static_cast<const Element*>(in), rows, moves, rope, count,
           depth, out);
  });
}

/// What the queries of each range see together.
std::vector<QueryRange> ranges_of(const std::vector<QueryPlace>& places, int padded) {
  std::vector<QueryRange> ranges(static_cast<std::size_t>(padded / range_queries));
  for (std::size_t r = 0; r < ranges.size(); ++r) {
    const std::size_t begin = std::min(places.size(), r * range_queries);
    const std::size_t end = std::min(places.size(), begin + range_queries);
    if (begin == end) continue;
    QueryRange& range = ranges[r];
    range = {places[begin].first, places[begin].first, places[begin].end, places[begin].end, 0, -1};
    for (std::size_t i = begin; i < end; ++i) {
      const QueryPlace& place = places[i];
      range.lowest_first = std::min(range.lowest_first, place.first);
      range.highest_first = std::max(range.highest_first, place.first);
      range.lowest_end = std::min(range.lowest_end, place.end);
      range.highest_end = std::max(range.highest_end, place.end);
      if (place.own < 0) continue;
      range.lowest_own = range.highest_own < 0 ? place.own : std::min(range.lowest_own, place.own);
      range.highest_own = std::max(range.highest_own, place.own);
    }
  }
  return ranges;
}

}  // namespace

const double* copy_sink_logits(DeviceCall& call, const LayerTensors& layer) {
  if (layer.sinks.empty()) return nullptr;
  std::vector<double> logits(layer.sinks.begin(), layer.sinks.end());
  for (double& logit : logits) logit *= std::numbers::log2e;
  return call.copy(logits);
}

PlacedQueries::PlacedQueries(DeviceCall& call, const LayerTensors& layer, std::span<const std::int32_t> queries,
                             std::vector<SoftmaxKeys> softmax_keys)
    : call_(call),
      layer_(layer),
      softmax_keys_(std::move(softmax_keys)),
      query_count_(static_cast<int>(queries.size())) {
  for (const SoftmaxKeys& some : softmax_keys_) places_.push_back(query_places(layer, queries, some));
  const bool moves = softmax_keys_.front().positions == Positions::cache;
  const bool tensor_cores = layer.q.dtype == layer.k.dtype && layer.k.dtype != DType::float32 && !moves;
  form_ = {tensor_cores ? layer.k.dtype : DType::float32, padded_depth(layer.k.dim), call.warp_groups()};

  // Few queries of many come alone.
  std::vector<int> rows;
  for (const QueryPlace& place : places_.front()) rows.push_back(place.stored);
  if (!call.tensors().holds(layer.q) && 2 * query_count_ <= layer.q.tokens) {
    gathered_rows_ = rows;
    for (int i = 0; i < query_count_; ++i) rows[static_cast<std::size_t>(i)] = i;
  }

  const int padded = (query_count_ + query_granule - 1) / query_granule * query_granule;
  const auto padded_size = static_cast<std::size_t>(padded);
  rows.resize(padded_size, -1);
  std::vector<int2> visible;
  std::vector<int> own;
  std::vector<QueryRange> ranges;
  for (const std::vector<QueryPlace>& places : places_) {
    for (const QueryPlace& place : places) {
      visible.push_back(make_int2(place.first, place.end));
      own.push_back(place.own);
    }
    visible.resize((visible.size() + padded_size - 1) / padded_size * padded_size, make_int2(0, 0));
    own.resize(visible.size(), -1);
    const std::vector<QueryRange> of_list = ranges_of(places, padded);
    ranges.insert(ranges.end(), of_list.begin(), of_list.end());
  }
  lists_.layer_kv_heads = layer.k.heads;
  lists_.group = layer.group();
  lists_.query_count = query_count_;
  lists_.padded_queries = padded;
  lists_.key_count = softmax_keys_.front().count;
  lists_.rows = call.copy(rows);
  lists_.visible = call.copy(visible);
  lists_.own = call.copy(own);
  lists_.ranges = call.copy(ranges);
  // A capped logit takes its log2(e) after its tanh.
  const float log2_e = std::numbers::log2e_v<float>;
  lists_.scale = layer.logit_softcap > 0.0F ? layer.softmax_scale / layer.logit_softcap : layer.softmax_scale * log2_e;
  lists_.cap = layer.logit_softcap > 0.0F ? layer.logit_softcap * log2_e : 0.0F;
  lists_.sink_logits = copy_sink_logits(call, layer);

  for (std::size_t list = 0; list < softmax_keys_.size(); ++list) {
    const SoftmaxKeys& some = softmax_keys_[list];
    const int* key_rows = nullptr;
    if (!some.resident.empty()) key_rows = call.copy(some.resident.first(static_cast<std::size_t>(some.count)));
    key_rows_.push_back(key_rows);
    if (!moves) continue;
    std::vector<int> key_moves, query_moves;
    for (int key = 0; key < some.count; ++key) key_moves.push_back(some.moved(key));
    for (const QueryPlace& place : places_[list]) query_moves.push_back(place.moved);
    query_moves.resize(padded_size, 0);
    key_moves_.push_back(call.copy(key_moves));
    query_moves_.push_back(call.copy(query_moves));
  }
  if (moves) frequencies_ = call.copy(layer.rope.inv_freq);

  const int all = layer.k.heads;
  const bool copies =
      form_.dtype == DType::float32 && (layer.q.dtype != layer.k.dtype || layer.k.dtype != DType::float32 || moves);
  if (!copies && call.tensors().holds(layer.q) && call.tensors().holds(layer.k)) {
    heads_at_once_ = all;
  } else {
    // A quarter of the memory for tensors, as many again for what is made of them.
    const std::size_t widened = form_.dtype == DType::float32 ? 4 / size_of(layer.k.dtype) + 1 : 2;
    const std::size_t of_head =
        widened * (DeviceTensors::head_bytes(layer.k) +
                   static_cast<std::size_t>(layer.group()) * DeviceTensors::head_bytes(layer.q));
    heads_at_once_ = static_cast<int>(
        std::clamp<std::size_t>(call.memory().limit() / 4 / of_head, 1, static_cast<std::size_t>(all)));
  }
}

PlacedQueries::Heads PlacedQueries::heads(int first, int count) {
  Heads heads(call_.stream());
  const int group = layer_.group();
  heads.queries_ = call_.tensors().lease(layer_.q, first * group, count * group, gathered_rows_, call_.stream());
  heads.keys_ = call_.tensors().lease(layer_.k, first, count, {}, call_.stream());
  heads.task_ = lists_;
  AttentionTask& task = heads.task_;
  task.kv_heads = count;
  task.lists = softmax_keys_.size() == 1 ? 1 : count;
  const std::ptrdiff_t list_offset = task.lists == 1 ? 0 : first;
  task.visible += list_offset * task.padded_queries;
  task.own += list_offset * task.padded_queries;
  task.ranges += list_offset * (task.padded_queries / range_queries);
  if (task.sink_logits != nullptr) task.sink_logits += first * group;

  const bool moves = !key_moves_.empty();
  const RopeTurn rope{frequencies_, static_cast<int>(layer_.rope.inv_freq.size()), layer_.rope.interleaved,
                      layer_.rope.offset};
  const auto make = [&](std::size_t bytes) { return heads.blocks_.emplace_back(call_.memory()).at_least(bytes); };
  const auto floats = [&](int rows) {
    return reinterpret_cast<float*>(
        make(static_cast<std::size_t>(rows) * static_cast<std::size_t>(form_.depth) * sizeof(float)));
  };
  const auto list_of = [&](int kv_head) { return softmax_keys_.size() == 1 ? 0 : static_cast<std::size_t>(kv_head); };

  std::vector<const void*> queries(heads.queries_.heads().begin(), heads.queries_.heads().end());
  if (form_.dtype == DType::float32 && (layer_.q.dtype != DType::float32 || moves)) {
    // One row for each query: their rows differ where a list moves them.
    std::vector<int> identity(static_cast<std::size_t>(task.padded_queries), -1);
    for (int i = 0; i < query_count_; ++i) identity[static_cast<std::size_t>(i)] = i;
    for (std::size_t h = 0; h < queries.size(); ++h) {
      const std::size_t list = list_of(first + static_cast<int>(h) / group);
      float* made = floats(query_count_);
      widen(layer_.q.dtype, queries[h], task.rows, moves ? query_moves_[list] : nullptr, rope, query_count_,
            form_.depth, made, call_.stream());
      queries[h] = made;
    }
    task.rows = call_.copy(identity);
  }
  std::vector<const void*> keys(heads.keys_.heads().begin(), heads.keys_.heads().end());
  for (int h = 0; h < count; ++h) {
    const std::size_t list = list_of(first + h);
    const void*& matrix = keys[static_cast<std::size_t>(h)];
    if (form_.dtype == DType::float32 && (layer_.k.dtype != DType::float32 || moves)) {
      float* made = floats(task.key_count);
      widen(layer_.k.dtype, matrix, key_rows_[list], moves ? key_moves_[list] : nullptr, rope, task.key_count,
            form_.depth, made, call_.stream());
      matrix = made;
    } else if (key_rows_[list] != nullptr) {
      const int pieces = form_.depth * static_cast<int>(size_of(form_.dtype)) / 16;
      const std::size_t total = static_cast<std::size_t>(task.key_count) * static_cast<std::size_t>(pieces);
      std::byte* made = make(total * 16);
      launch(gather_rows, dim3(blocks_for(total, threads)), threads, 0, call_.stream(),
             static_cast<const uint4*>(matrix), key_rows_[list], task.key_count, pieces,
             reinterpret_cast<uint4*>(made));
      matrix = made;
    }
  }
  task.queries = call_.copy(queries);
  task.keys = call_.copy(keys);
  return heads;
}

}  // namespace kvreplay
