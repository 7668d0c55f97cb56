// Kept moments: logits of as many queries at a time as fit, then sums over what each set holds, then outputs.
#include <algorithm>

#include "attention/distinct_sets.h"
#include "cuda/attention_operands.h"
#include "cuda/device_call.h"
#include "cuda/kept_rows.h"
#include "error.h"

namespace kvreplay {
namespace {

std::size_t words_of(const KeptSet& set) { return static_cast<std::size_t>(set.rows()) * set.row_bits(0).size(); }

/// Brings the sets of some queries to the device, those of one query after those of another.
class PlacedSets {
 public:
  PlacedSets(DeviceMemory& memory, PinnedMemory& staged, std::span<const KeptSets> sets)
      : sets_(sets), staged_(staged), on_device_(memory) {}

  /// The most that the sets of one query alone have.
  std::size_t bytes_a_query(int queries) const {
    std::size_t most = 0;
    for (int query = 0; query < queries; ++query) {
      std::size_t words = 0;
      for (const KeptSets some : sets_)
        if (some.size() > 1) words += words_of(some[static_cast<std::size_t>(query)]);
      most = std::max(most, words * sizeof(std::uint64_t) + sets_.size() * sizeof(PlacedSet));
    }
    return most;
  }

  /// Fills `bits` and `placed` of rows. What was queued on those before must have ended.
  void place(KeptRows& rows, cudaStream_t stream) {
    std::vector<PlacedSet> placed;
    std::vector<const KeptSet*> brought;
    std::size_t words = 0;
    for (const KeptSets some : sets_) {
      for (int query = rows.first_query; query < rows.first_query + rows.queries; ++query) {
        const KeptSet& set = some[some.size() == 1 ? 0 : static_cast<std::size_t>(query)];
        if (query > rows.first_query && some.size() == 1) {
          placed.push_back(placed.back());
          continue;
        }
        placed.push_back({words * 2, static_cast<int>(set.row_bits(0).size() * 2), set.tokens(), set.heads()});
        brought.push_back(&set);
        words += words_of(set);
      }
    }
    const std::size_t bytes = words * sizeof(std::uint64_t) + placed.size() * sizeof(PlacedSet);
    std::byte* staged = staged_.at_least(bytes);
    std::byte* to = staged;
    for (const KeptSet* set : brought) {
      for (int row = 0; row < set->rows(); ++row) {
        const std::span<const std::uint64_t> bits = set->row_bits(row);
        std::memcpy(to, bits.data(), bits.size_bytes());
        to += bits.size_bytes();
      }
    }
    std::memcpy(to, placed.data(), placed.size() * sizeof(PlacedSet));
    std::byte* device = on_device_.at_least(bytes);
    check(cudaMemcpyAsync(device, staged, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
    rows.bits = reinterpret_cast<const std::uint32_t*>(device);
    rows.placed = reinterpret_cast<const PlacedSet*>(device + words * sizeof(std::uint64_t));
    rows.sets = static_cast<int>(sets_.size());
  }

 private:
  std::span<const KeptSets> sets_;
  PinnedMemory& staged_;
  DeviceBuffer<std::byte> on_device_;
};

}  // namespace

KeptMoments CudaBackend::kept_moments(const LayerTensors& layer, std::span<const std::int32_t> queries, int boundary,
                                      std::span<const KeptSets> kept, MomentParts parts) {
  const int query_count = static_cast<int>(queries.size());
  const std::size_t cells = static_cast<std::size_t>(layer.q.heads) * queries.size();
  KeptMoments result;
  result.parts = parts;
  result.full.resize(cells);
  result.kept.resize(kept.size() * cells);
  const std::size_t numbers = cells * static_cast<std::size_t>(layer.v.dim);  // of the outputs of a set
  if (parts.vectors) {
    result.outputs.full.resize(numbers);
    result.outputs.errors.resize(kept.size() * numbers);
  }
  if (query_count == 0) return result;

  const DistinctSets distinct(kept, boundary);
  const std::size_t sets = distinct.sets().size();
  std::vector<Moments> moments(sets * cells);
  // Given back after the call has waited for what was queued.
  PlacedSets placed_sets(memory_, kept_sets_, distinct.sets());
  DeviceBuffer<float> logits(memory_);
  DeviceBuffer<HeldState> states(memory_);
  DeviceBuffer<double> partials(memory_);
  DeviceCall call(*this);
  PlacedQueries placed(call, layer, queries, {{.count = queries.back() + 1}});
  auto* made = call.room<Moments>(moments.size());
  const KeptOutputs outputs{parts.vectors ? call.room<float>(sets * numbers) : nullptr, layer.v.dim};

  const int depth = padded_depth(layer.v.dim);
  for (int first = 0; first < layer.k.heads; first += placed.kv_heads_at_once()) {
    const int kv_heads = std::min(placed.kv_heads_at_once(), layer.k.heads - first);
    DeviceTensors::Lease values;
    if (parts.outputs) values = call.tensors().lease(layer.v, first, kv_heads, {}, call.stream());
    const void* const* value_heads = call.copy(std::vector<const void*>(values.heads().begin(), values.heads().end()));
    const PlacedQueries::Heads heads = placed.heads(first, kv_heads);
    KeptRows rows{.task = heads.task(),
                  .first_kv_head = first,
                  .query_heads = layer.q.heads,
                  .queries = 1,
                  .boundary = boundary,
                  .sets = static_cast<int>(sets)};
    const int group = rows.task.group;
    const auto rows_a_query = static_cast<std::size_t>(kv_heads * group);
    const auto keys = static_cast<std::size_t>(rows.task.key_count);
    const std::size_t partials_a_query = parts.outputs ? output_partials(rows, depth) : 0;
    // An eighth of the memory for logits and another for what is made of them, half of one for kept sets.
    const std::size_t most = std::max({rows_a_query * keys * sizeof(float),
                                       partials_a_query * sizeof(double) + rows_a_query * sets * sizeof(HeldState),
                                       2 * placed_sets.bytes_a_query(query_count)});
    const auto at_once =
        static_cast<int>(std::clamp<std::size_t>(memory_.limit() / 8 / most, 1, static_cast<std::size_t>(query_count)));
    for (rows.first_query = 0; rows.first_query < query_count; rows.first_query += at_once) {
      rows.queries = std::min(at_once, query_count - rows.first_query);
      const auto queries_now = static_cast<std::size_t>(rows.queries);
      check(cudaStreamSynchronize(call.stream()), "cudaStreamSynchronize");
      placed_sets.place(rows, call.stream());
      float* panel = logits.at_least(queries_now * rows_a_query * keys);
      HeldState* held = states.at_least(queries_now * rows_a_query * sets);
      write_logits(placed.form(), rows.task, rows.first_query * group, rows.queries * group, rows.task.key_count, panel,
                   call.bad(), call.stream());
      rows.logits = panel;
      add_held_sums(rows, parts, held, made, call.stream());
      if (parts.outputs)
        add_outputs(rows, layer.v.dtype, depth, value_heads, held, partials.at_least(queries_now * partials_a_query),
                    made, outputs, call.stream());
    }
  }
  call.fetch(static_cast<const Moments*>(made), std::span(moments));
  std::vector<float> vectors(parts.vectors ? sets * numbers : 0);
  call.fetch(static_cast<const float*>(outputs.vectors), std::span(vectors));
  if (call.found_bad()) throw Error{Refusal::input, "attention", "logits", "finite numbers", "NaN or Inf"};
  std::copy_n(moments.begin(), cells, result.full.begin());
  std::copy_n(vectors.begin(), result.outputs.full.size(), result.outputs.full.begin());
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const auto number = static_cast<std::size_t>(distinct.number_of()[i]);
    std::copy_n(moments.data() + number * cells, cells, result.kept.data() + i * cells);
    if (parts.vectors && number > 0)  // the errors of what keeps everything are 0
      std::copy_n(vectors.data() + number * numbers, numbers, result.outputs.errors.data() + i * numbers);
  }
  return result;
}

}  // namespace kvreplay
