#include "replay/call_seconds.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <vector>

#include "observables/projected_outputs.h"
#include "positions.h"
#include "random.h"

namespace kvreplay {
namespace {

constexpr int sample_sets = 4;

/// The shortest of some calls, after one that warms up caches, threads and buffers.
template <class Call>
double seconds_of(Call call) {
  double shortest = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 4; ++i) {
    const auto start = std::chrono::steady_clock::now();
    call();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (i > 0) shortest = std::min(shortest, seconds);
  }
  return shortest;
}

}  // namespace

struct CallSeconds::Sample {
  explicit Sample(const LayerShape& shape) {
    const auto fill = [&](std::vector<float>& values, int heads, int dim, std::uint64_t tag) {
      values.resize(static_cast<std::size_t>(heads) * sample_tokens * static_cast<std::size_t>(dim));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(uniform(chain(tag, i))) - 0.5F;
      return TensorView{reinterpret_cast<const std::byte*>(values.data()), DType::float32, heads, sample_tokens, dim};
    };
    tensors.q = fill(q, shape.query_heads, shape.key_dim, 1);
    tensors.k = fill(k, shape.kv_heads, shape.key_dim, 2);
    tensors.v = fill(v, shape.kv_heads, shape.value_dim, 3);
    tensors.softmax_scale = 1.0F / std::sqrt(static_cast<float>(shape.key_dim));
  }

  std::vector<float> q, k, v;
  LayerTensors tensors;
  std::map<Call, double> seconds;
};

CallSeconds::CallSeconds(Backend& backend) : backend_(backend) {}
CallSeconds::~CallSeconds() = default;

double CallSeconds::operator()(Call call, const LayerShape& shape) {
  std::unique_ptr<Sample>& of_shape = samples_[{shape.query_heads, shape.kv_heads, shape.key_dim, shape.value_dim}];
  if (!of_shape) of_shape = std::make_unique<Sample>(shape);
  if (const auto known = of_shape->seconds.find(call); known != of_shape->seconds.end()) return known->second;
  return of_shape->seconds[call] = timed(call, shape, of_shape->tensors);
}

double CallSeconds::timed(Call call, const LayerShape& shape, const LayerTensors& sample) {
  const std::vector<std::int32_t> all = position_range(0, sample_tokens);
  const std::span<const std::int32_t> last = std::span(all).last(sample_queries);
  // Sets that differ, since equal ones are computed once: set i keeps every second token, and token i at the end.
  const auto moments_of = [&](int count, MomentParts parts) {
    std::vector<KeptSet> sets(static_cast<std::size_t>(count), KeptSet(Heads::kv, sample.k.heads, sample_tokens));
    std::vector<KeptSets> kept;
    for (int i = 0; i < count; ++i) {
      KeptSet& set = sets[static_cast<std::size_t>(i)];
      for (int row = 0; row < set.rows(); ++row) {
        for (int j = 0; j < sample_tokens - sample_sets; j += 2) set.keep(row, j);
        set.keep(row, sample_tokens - 1 - i);
      }
      kept.emplace_back(&set, 1);
    }
    return seconds_of([&] { backend_.kept_moments(sample, last, sample_tokens, kept, parts); });
  };
  // What is beyond the sums of attention, of each set and of everything, which is always among them.
  const auto cell_files_of = [&](MomentParts parts, double shares) {
    return std::max(0.0, moments_of(sample_sets, parts) - moments_of(sample_sets, {})) / (1.0 + shares * sample_sets);
  };
  switch (call) {
    case Call::cumulative:
      return seconds_of([&] { backend_.attention_sums(sample, {.queries = all, .columns = sample_tokens}); });
    case Call::rows:
      return seconds_of([&] { backend_.attention_sums(sample, {.queries = last, .columns = sample_tokens}); });
    case Call::moments:
      return moments_of(0, {});
    case Call::sets:
      return std::max(0.0, moments_of(sample_sets, {}) - (*this)(Call::moments, shape)) / sample_sets;
    case Call::outputs:
      return cell_files_of({.outputs = true}, 0.5);
    case Call::others:
      return cell_files_of({.logits = true, .unaligned = true}, 1.0);
    case Call::projection: {
      const std::vector<float> outputs(sample.q.bytes() / sizeof(float) / sample_tokens * sample_queries, 1.0F);
      const TensorView projection{sample.q.data, sample.q.dtype, 1, sample_tokens, sample.q.heads * sample.q.dim};
      return seconds_of(
          [&] { projected_squares(projection, outputs, sample.q.heads, sample_queries, backend_.threads()); });
    }
    case Call::similarity:
      return seconds_of([&] { backend_.similarity_row_maxima(sample.k, sample_tokens); });
    case Call::comparison: {
      KeptSet half(Heads::layer, 1, sample_tokens);
      for (int j = 0; j < sample_tokens; j += 2) half.keep(0, j);
      return seconds_of([&] {
        backend_.compare_attention(sample, sample, Positions::cache, last.last(sample_few_queries), sample_tokens,
                                   KeptSets(&half, 1));
      });
    }
    case Call::online:
      return seconds_of(
          [&] { backend_.online_eviction(sample, {.tokens = sample_steps, .budget = sample_steps / 2}); });
    case Call::redundancy:
      break;
  }
  const std::vector<std::int32_t> some = position_range(0, sample_steps);
  return seconds_of([&] { backend_.least_redundant(sample, {.resident = some, .keep = sample_steps / 2}); });
}

}  // namespace kvreplay
