// The general comparison: as many queries at a time as have room to be written out.
#include "cuda/comparison.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <span>
#include <vector>

#include "attention/softmax_keys.h"
#include "cuda/attention_operands.h"
#include "cuda/device_call.h"
#include "float_types.h"
#include "parallel.h"

namespace kvreplay {
namespace {

// Of a device with a lot of memory no more is taken: rows of many queries keep it busy.
constexpr std::size_t most_panel_bytes = std::size_t{1} << 30;
// A grid has at most 65535 tiles of rows one above the other.
constexpr int most_rows = 32768;

/// The keys [0, end) that are resident, everything beyond the sets' tokens among them.
ResidentKeys resident_keys(DeviceCall& call, KeptSets sets, int group, int query_heads, int end) {
  const KeptSet& one = sets.front();
  ResidentKeys resident{.sets = static_cast<int>(sets.size()),
                        .rows = one.rows(),
                        .words = (end + 63) / 64,
                        .heads_a_row = one.heads() == Heads::kv      ? group
                                       : one.heads() == Heads::query ? 1
                                                                     : query_heads};
  std::vector<std::uint64_t> bits;
  std::vector<int> before;
  for (const KeptSet& set : sets) {
    for (int row = 0; row < set.rows(); ++row) {
      const std::span<const std::uint64_t> of_row = set.row_bits(row);
      int count = 0;
      for (int w = 0; w < resident.words; ++w) {
        const auto at = static_cast<std::size_t>(w);
        std::uint64_t word = at < of_row.size() ? of_row[at] : 0;
        const int covered = set.tokens() - 64 * w;
        if (covered < 64) word |= ~std::uint64_t{0} << std::max(0, covered);
        bits.push_back(word);
        before.push_back(count);
        count += std::popcount(word);
      }
    }
  }
  resident.bits = call.copy(bits);
  resident.before = call.copy(before);
  return resident;
}

/// Numbers of some heads, `count` of each, to where those of a head begin `stride` numbers after those of the last.
template <class Number>
void copy_heads(std::span<const Number> from, std::size_t count, Number* to, std::size_t stride) {
  for (; !from.empty(); from = from.subspan(count), to += stride) std::copy_n(from.data(), count, to);
}

/// [kv_heads, rows, width] of a task, 0 where a query does not see a key.
std::vector<double> log_weights(const LogWeights& weights, const ComparisonTask& task,
                                std::span<const ComparedQuery> queries, int threads) {
  std::vector<double> all(comparison_panel(task));
  const std::size_t width = static_cast<std::size_t>(task.width());
  all_side_by_side(threads, all.size() / width, [&](std::size_t number) {
    const int kv_head = static_cast<int>(number) / task.rows(), row = static_cast<int>(number) % task.rows();
    const ComparedQuery& query = queries[static_cast<std::size_t>(row / task.group)];
    weights(task.first_head + kv_head * task.group + row % task.group, query.own, query.first,
            std::span(all).subspan(number * width + static_cast<std::size_t>(query.first - task.first_key),
                                   static_cast<std::size_t>(query.end - query.first)));
  });
  return all;
}

ComparedSet room_for(const LayerTensors& layer, std::size_t queries, bool vectors) {
  ComparedSet room;
  room.comparisons.resize(static_cast<std::size_t>(layer.q.heads) * queries);
  if (vectors) room.outputs.full.assign(room.comparisons.size() * static_cast<std::size_t>(layer.v.dim), 0.0F);
  room.outputs.errors = room.outputs.full;
  return room;
}

}  // namespace

std::vector<ComparedSet> CudaBackend::compare_sets(const LayerTensors& layer, std::span<const ChangedSet> sets,
                                                   std::span<const std::int32_t> queries, int boundary, bool vectors) {
  std::vector<ComparedSet> compared;
  for (const ChangedSet& set : sets)
    compared.push_back(set.values != nullptr ? compare_evolving_set(layer, set, queries, boundary, vectors)
                                             : compare_set(layer, set, queries, boundary, vectors));
  return compared;
}

ComparedSet CudaBackend::compare_evolving_set(const LayerTensors& layer, const ChangedSet& set,
                                              std::span<const std::int32_t> queries, int boundary, bool vectors) {
  const std::size_t count = queries.size(), dim = static_cast<std::size_t>(layer.v.dim);
  ComparedSet compared = room_for(layer, count, vectors);
  std::vector<EvolvingValues::Reader> readers;
  for (int head = 0; head < layer.k.heads; ++head) readers.push_back(set.values->of_head(head));
  std::vector<float> values;  // [Hkv, T, d]
  for (std::size_t i = 0; i < count; ++i) {
    values.clear();
    for (const EvolvingValues::Reader& before : readers) {
      const std::span<const float> of_head = before(queries[i]);
      values.insert(values.end(), of_head.begin(), of_head.end());
    }
    LayerTensors stored = set.stored;
    stored.v = view_of(values, layer.v);
    const ComparedSet one =
        compare_set(layer, {stored, set.positions, set.kept.size() == 1 ? set.kept : set.kept.subspan(i, 1)},
                    queries.subspan(i, 1), boundary, vectors);
    copy_heads<Comparison>(one.comparisons, 1, compared.comparisons.data() + i, count);
    if (!vectors) continue;
    copy_heads<float>(one.outputs.full, dim, compared.outputs.full.data() + i * dim, count * dim);
    copy_heads<float>(one.outputs.errors, dim, compared.outputs.errors.data() + i * dim, count * dim);
  }
  return compared;
}

ComparedSet CudaBackend::compare_set(const LayerTensors& layer, const ChangedSet& set,
                                     std::span<const std::int32_t> queries, int boundary, bool vectors) {
  const auto& [stored, positions, kept, values_of_queries, weights] = set;
  assert(kept.size() == 1 || kept.size() == queries.size());
  const auto query_count = queries.size();
  const int group = layer.group();
  const auto dim = static_cast<std::size_t>(layer.v.dim);
  ComparedSet result = room_for(layer, query_count, vectors);
  if (queries.empty()) return result;
  const std::vector<QueryPlace> places = query_places(layer, queries, {.count = queries.back() + 1});

  DeviceCall call(*this);
  std::vector<std::int32_t> brought;  // rows of the queries' tensor; empty: all
  if (!tensors_.holds(layer.q))
    for (const QueryPlace& place : places) brought.push_back(place.stored);
  const double* sink_logits = copy_sink_logits(call, layer);
  const bool same_keys = stored.k.data == layer.k.data;
  const bool same_values = stored.v.data == layer.v.data;

  const std::size_t of_head = DeviceTensors::head_bytes(layer.k) + DeviceTensors::head_bytes(layer.v) +
                              DeviceTensors::head_bytes(stored.k) + DeviceTensors::head_bytes(stored.v) +
                              static_cast<std::size_t>(group) * std::max<std::size_t>(1, brought.size()) *
                                  static_cast<std::size_t>(padded_depth(layer.q.dim)) * size_of(layer.q.dtype);
  const int heads_at_once = static_cast<int>(
      std::clamp<std::size_t>(memory_.limit() / 4 / of_head, 1, static_cast<std::size_t>(layer.k.heads)));
  const auto operands = [&](const TensorView& tensor, const DeviceTensors::Lease& lease) {
    return StoredVectors{call.copy(lease.heads()), tensor.dtype, padded_depth(tensor.dim), tensor.dim};
  };

  for (int first = 0; first < layer.k.heads; first += heads_at_once) {
    const int heads = std::min(heads_at_once, layer.k.heads - first);
    const auto lease = [&](const TensorView& tensor) {
      return tensors_.lease(tensor, first, heads, {}, call.stream());
    };
    const DeviceTensors::Lease of_queries =
        tensors_.lease(layer.q, first * group, heads * group, brought, call.stream());
    const DeviceTensors::Lease keys = lease(layer.k), values = lease(layer.v);
    const DeviceTensors::Lease stored_keys = same_keys ? DeviceTensors::Lease() : lease(stored.k);
    const DeviceTensors::Lease stored_values = same_values ? DeviceTensors::Lease() : lease(stored.v);
    ComparisonTask task{.queries = operands(layer.q, of_queries),
                        .keys = operands(layer.k, keys),
                        .values = operands(layer.v, values),
                        .kv_heads = heads,
                        .group = group,
                        .first_head = first * group,
                        .boundary = boundary,
                        .moves = positions == Positions::cache,
                        .frequencies = call.copy(layer.rope.inv_freq),
                        .pairs = static_cast<int>(layer.rope.inv_freq.size()),
                        .interleaved = layer.rope.interleaved,
                        .offset = layer.rope.offset,
                        .scale = static_cast<double>(layer.softmax_scale),
                        .cap = static_cast<double>(layer.logit_softcap),
                        .sink_logits = sink_logits == nullptr ? nullptr : sink_logits + first * group};
    task.stored_keys = same_keys ? task.keys : operands(stored.k, stored_keys);
    task.stored_values = same_values ? task.values : operands(stored.v, stored_values);

    // A query's logits of full and stored keys, and the log weights of these.
    const std::size_t of_query = (weights == nullptr ? 2 : 3) * sizeof(double) *
                                 static_cast<std::size_t>(heads * group) * static_cast<std::size_t>(queries.back() + 1);
    const std::size_t at_once = std::clamp<std::size_t>(std::min(memory_.limit() / 8, most_panel_bytes) / of_query, 1,
                                                        static_cast<std::size_t>(std::max(1, most_rows / group)));
    for (std::size_t begin = 0; begin < query_count; begin += at_once) {
      const std::size_t count = std::min(at_once, query_count - begin);
      DeviceCall some(*this);
      std::vector<ComparedQuery> compared;
      task.first_key = queries.back();
      task.end_key = 0;
      for (std::size_t query = begin; query < begin + count; ++query) {
        const QueryPlace& place = places[query];
        compared.push_back(
            {brought.empty() ? place.stored : static_cast<int>(query), place.first, place.end, place.own});
        task.first_key = std::min(task.first_key, place.first);
        task.end_key = std::max(task.end_key, place.end);
      }
      task.query_count = static_cast<int>(count);
      task.places = some.copy(compared);
      task.resident =
          resident_keys(some, kept.size() == 1 ? kept : kept.subspan(begin, count), group, layer.q.heads, task.end_key);
      task.log_weights = weights == nullptr ? nullptr : some.copy(log_weights(*weights, task, compared, threads()));
      const std::size_t rows = static_cast<std::size_t>(heads * group) * count;
      Comparison* made = some.room<Comparison>(rows);
      float* made_vectors = !vectors ? nullptr : some.room<float>(2 * rows * dim);
      compare(task, some.room<double>(comparison_panel(task)), some.room<double>(comparison_panel(task)),
              some.room<double>(comparison_outputs(task)), made, made_vectors, some.stream());
      std::vector<Comparison> found(rows);
      some.fetch(static_cast<const Comparison*>(made), std::span(found));
      std::vector<float> found_vectors(!vectors ? 0 : 2 * rows * dim);
      some.fetch(static_cast<const float*>(made_vectors), std::span(found_vectors));
      const std::size_t cell = static_cast<std::size_t>(first * group) * query_count + begin;
      copy_heads<Comparison>(found, count, result.comparisons.data() + cell, query_count);
      if (!vectors) continue;
      const std::span<const float> both(found_vectors);
      copy_heads(both.first(rows * dim), count * dim, result.outputs.full.data() + cell * dim, query_count * dim);
      copy_heads(both.subspan(rows * dim), count * dim, result.outputs.errors.data() + cell * dim, query_count * dim);
    }
  }
  return result;
}

}  // namespace kvreplay
