// Kept moments of many sets from one pass over the attention of the eval queries. "Everything" is a set like the others
// and goes the same way, so a set that keeps all visible keys has its bits.
#include <algorithm>
#include <atomic>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <optional>

#include "attention/distinct_sets.h"
#include "cpu/cpu_backend.h"
#include "error.h"

namespace kvreplay {
namespace {

// Query rows of one block. More would pack the keys less often, and their exponentials would leave the second-level
// cache.
constexpr int block_rows = 48;
// Terms of a sum of exponentials below this, or their squares, may have been lost to underflow.
constexpr double smallest_safe_sum = 0x1p-40;

/// Whether a sum that metrics read has lost terms: it is small, and the row holds keys in [begin, end) all the same.
bool lost(double sum, const MomentRow& row, const KeptSet& set, int group, int begin, int end) {
  return sum < smallest_safe_sum && row.holds_any(set, group, begin, end);
}

bool lost_parts(const RowSums& sums, const MomentRow& row, const KeptSet& set, int group, int boundary) {
  return lost(sums.keys(), row, set, group, 0, row.place.end) ||
         lost(sums.sinks.sum + sums.rest.sum, row, set, group, 0, boundary) ||
         lost(sums.rest.sum, row, set, group, sink_tokens, boundary);
}

/// What a set's row comes to: sums of weights, and the output.
struct RowOfSet {
  RowSums sums;
  std::vector<double> output;  // empty: not asked for
};

void compare_outputs(std::span<const double> kept, std::span<const double> full, Moments& moments) {
  for (std::size_t c = 0; c < kept.size(); ++c) {
    const double error = full[c] - kept[c];
    moments.output_square += kept[c] * kept[c];
    moments.output_dot += full[c] * kept[c];
    moments.error_square += error * error;
  }
}

Moments compare(const RowOfSet& kept, const RowOfSet& full) {
  Moments moments = moments_of(kept.sums, full.sums, 1.0);
  compare_outputs(kept.output, full.output, moments);
  return moments;
}

/// Metrics divide moments of a set by those of everything, `full`. Of a set whose moments, and those of everything
/// beside it, come from other numbers, `full_beside`: what gives the same quotients.
Moments in_units_of(const Moments& full, Moments kept, const Moments& full_beside) {
  const auto rescale = [](double& part, double beside, double unit) {
    if (beside != 0) part = part / beside * unit;
  };
  rescale(kept.mass, full_beside.mass, full.mass);
  rescale(kept.square, full_beside.square, full.square);
  rescale(kept.prompt_mass, full_beside.prompt_mass, full.prompt_mass);
  rescale(kept.prompt_square, full_beside.prompt_square, full.prompt_square);
  rescale(kept.nosink_mass, full_beside.nosink_mass, full.nosink_mass);
  rescale(kept.nosink_square, full_beside.nosink_square, full.nosink_square);
  for (double* part : {&kept.output_square, &kept.output_dot, &kept.error_square})
    rescale(*part, full_beside.output_square, full.output_square);
  return kept;
}

/// A row in float64, from its logits on: for sums that the exponentials of float32 cannot give.
class WideRow {
 public:
  WideRow(const TileKernels& kernels, const LayerTensors& layer, int boundary, int kv_head, const MomentRow& row)
      : kernels_(kernels), layer_(layer), boundary_(boundary), kv_head_(kv_head), row_(row) {
    const auto width = static_cast<std::size_t>(layer.k.dim);
    const double cap = static_cast<double>(layer.logit_softcap);
    std::vector<float> query(width), key(width);
    kernels.widen(layer.q.row(row.head, row.place.stored), layer.q.dtype, layer.q.dim, query.data());
    for (int position = row.place.first; position < row.place.end; ++position) {
      kernels.widen(layer.k.row(kv_head, position), layer.k.dtype, layer.k.dim, key.data());
      double logit = 0;
      for (std::size_t c = 0; c < width; ++c) logit += static_cast<double>(query[c]) * static_cast<double>(key[c]);
      logit *= static_cast<double>(layer.softmax_scale);
      logits_.push_back((cap > 0 ? cap * std::tanh(logit / cap) : logit) * std::numbers::log2e);
    }
    highest_ = std::ranges::max(logits_);
    sink_ = layer.sink(row.head) * std::numbers::log2e;
  }

  /// Weights are those beside the row's largest logit; in the output they are beside the set's own, which may be all
  /// but nothing to the row.
  RowOfSet of(const KeptSet& set, bool with_output) const {
    const int group = layer_.group();
    RowOfSet found;
    found.sums.sink_logit = sink_weight(sink_, highest_);
    double highest_held = -HUGE_VAL;
    for (int key = row_.place.first; key < row_.place.end; ++key) {
      if (!row_.holds(set, group, key)) continue;
      highest_held = std::max(highest_held, logit(key));
      const double weight = weight_of(logit(key) - highest_);
      RowSums& sums = found.sums;
      MaskedSums& of_section = key >= boundary_ ? sums.later : key < sink_tokens ? sums.sinks : sums.rest;
      of_section.sum += weight;
      of_section.square += weight * weight;
    }
    if (!with_output) return found;
    found.output.resize(static_cast<std::size_t>(layer_.v.dim));
    std::vector<float> value(found.output.size());
    double total = sink_weight(sink_, highest_held);
    for (int key = row_.place.first; key < row_.place.end; ++key) {
      if (!row_.holds(set, group, key)) continue;
      const double weight = weight_of(logit(key) - highest_held);
      total += weight;
      kernels_.widen(layer_.v.row(kv_head_, key), layer_.v.dtype, layer_.v.dim, value.data());
      for (std::size_t c = 0; c < value.size(); ++c) found.output[c] += weight * static_cast<double>(value[c]);
    }
    for (double& component : found.output) component /= total;
    return found;
  }

 private:
  double logit(int key) const { return logits_[static_cast<std::size_t>(key - row_.place.first)]; }
  static double weight_of(double below_highest) {
    const double weight = std::exp2(below_highest);
    return weight < least_weight ? 0.0 : weight;
  }

  const TileKernels& kernels_;
  const LayerTensors& layer_;
  int boundary_;
  int kv_head_;
  const MomentRow& row_;
  std::vector<double> logits_;  // of the keys that the row sees, in units of log 2
  double highest_ = 0;
  double sink_ = 0;
};

/// Makes moments of a block's sums, and writes them where results are.
struct MomentWriter {
  const TileKernels& kernels;
  const MomentTask& task;
  std::span<const int> distinct;  // of each caller's set, the number of the set of the task that equals it
  int query_count;
  KeptMoments& result;

  void write(const MomentBlock& block, int number, const MomentRow& row) const;

 private:
  bool lost_in(const RowSums& sums, const MomentRow& row, std::size_t set) const {
    return lost_parts(sums, row, task.sets[set].at(row.query), task.layer.group(), task.boundary);
  }
  RowOfSet in_float32(const MomentBlock& block, int number, std::size_t set) const {
    RowOfSet found{block.sums(number, static_cast<int>(set)), std::vector<double>(task.parts.outputs ? dim() : 0)};
    block.output(number, static_cast<int>(set), found.sums.total(), found.output);
    return found;
  }
  std::size_t dim() const { return static_cast<std::size_t>(task.layer.v.dim); }
};

void MomentWriter::write(const MomentBlock& block, int number, const MomentRow& row) const {
  const bool vectors = task.parts.vectors;
  std::optional<WideRow> wide;
  const auto in_float64 = [&](std::size_t set) {
    if (!wide) wide.emplace(kernels, task.layer, task.boundary, row.head / task.layer.group(), row);
    return wide->of(task.sets[set].at(row.query), task.parts.outputs);
  };
  const RowOfSet full = in_float32(block, number, 0);
  const bool full_is_wide = lost_in(full.sums, row, 0);
  std::optional<RowOfSet> wide_full;
  std::vector<Moments> of_set;
  std::vector<float> errors(vectors ? task.sets.size() * dim() : 0);  // [sets, dim]
  const auto write_error = [&](std::size_t i, const RowOfSet& of_this, const RowOfSet& beside) {
    for (std::size_t c = 0; vectors && c < dim(); ++c)
      errors[i * dim() + c] = static_cast<float>(of_this.output[c] - beside.output[c]);
  };
  for (std::size_t i = 0; i < task.sets.size(); ++i) {
    const RowOfSet of_this = i == 0 ? full : in_float32(block, number, i);
    // Of a pair of sets, sums that are divided by each other's come from the same numbers; other pairs have no say.
    Moments moments;
    if (full_is_wide || lost_in(of_this.sums, row, i)) {
      if (!wide_full) wide_full = in_float64(0);
      const RowOfSet wide_this = i == 0 ? *wide_full : in_float64(i);
      moments = compare(wide_this, *wide_full);
      if (!full_is_wide) moments = in_units_of(of_set.front(), moments, compare(*wide_full, *wide_full));
      write_error(i, wide_this, *wide_full);
    } else {
      moments = compare(of_this, full);
      write_error(i, of_this, full);
    }
    moments.logit_square = of_this.sums.logit_square * std::numbers::ln2 * std::numbers::ln2;
    moments.unaligned_dot = of_this.sums.unaligned_dot / (full.sums.total() * full.sums.total());
    of_set.push_back(moments);
  }

  const std::size_t cell = product(row.head, query_count) + static_cast<std::size_t>(row.query);
  result.full[cell] = of_set.front();
  const std::vector<double>& output = full_is_wide ? wide_full->output : full.output;
  for (std::size_t c = 0; vectors && c < dim(); ++c)
    result.outputs.full[cell * dim() + c] = static_cast<float>(output[c]);
  for (std::size_t i = 0; i < distinct.size(); ++i) {
    const auto set = static_cast<std::size_t>(distinct[i]);
    const std::size_t at = i * result.full.size() + cell;
    result.kept[at] = of_set[set];
    if (vectors) std::copy_n(errors.data() + set * dim(), dim(), result.outputs.errors.data() + at * dim());
  }
}

}  // namespace

KeptMoments CpuBackend::kept_moments(const LayerTensors& layer, std::span<const std::int32_t> queries, int boundary,
                                     std::span<const KeptSets> kept, MomentParts parts) {
  const int query_count = static_cast<int>(queries.size());
  const int group = layer.group();
  KeptMoments result;
  result.parts = parts;
  result.full.resize(product(layer.q.heads, query_count));
  result.kept.resize(kept.size() * result.full.size());
  const auto dim = static_cast<std::size_t>(layer.v.dim);
  if (parts.vectors) {
    result.outputs.full.resize(result.full.size() * dim);
    result.outputs.errors.resize(result.kept.size() * dim);
  }
  if (query_count == 0) return result;
  assert(std::ranges::all_of(kept, [&](KeptSets sets) { return sets.size() == 1 || sets.size() == queries.size(); }));

  const SoftmaxKeys softmax_keys{.count = queries.back() + 1};
  const TileForm& form = form_of(kernels_, layer, softmax_keys);
  const std::vector<QueryPlace> places = query_places(layer, queries, softmax_keys);
  const DistinctSets distinct(kept, boundary);
  std::vector<NumberedSets> sets;
  std::vector<int> with_later{0};
  for (const KeptSets some : distinct.sets()) {
    const bool beyond = std::ranges::any_of(some, [&](const KeptSet& set) { return set.tokens() > boundary; });
    if (beyond) with_later.push_back(static_cast<int>(sets.size()));
    sets.push_back({some, beyond ? static_cast<int>(with_later.size()) - 1 : 0});
  }
  const MomentTask task{layer, boundary, parts, sets, with_later};
  std::atomic<bool> finite{true};

  const MomentWriter writer{kernels_, task, distinct.number_of(), query_count, result};
  const int rows = group * query_count;
  const int blocks = (rows + block_rows - 1) / block_rows;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads_)
  for (int kv_head = 0; kv_head < layer.k.heads; ++kv_head) {
    for (int block = 0; block < blocks; ++block) {
      if (interruption().ended()) continue;
      ThreadScratch& mine = scratch();
      std::vector<MomentRow> block_of_rows;
      mine.rows.clear();
      for (int row = block * block_rows; row < std::min((block + 1) * block_rows, rows); ++row) {
        const int query = row % query_count;
        const QueryPlace& place = places[static_cast<std::size_t>(query)];
        block_of_rows.push_back({kv_head * group + row / query_count, query, place});
        mine.rows.push_back({block_of_rows.back().head, place});
      }
      mine.block.prepare(layer, form, mine.rows, parts.logits);
      const bool computed = mine.block.compute([&](int tile) -> const float* {
        float* keys_of_tile = mine.keys.at_least(product(form.cells(layer.k.dim), kernels_.keys));
        pack_keys(kernels_, form, layer, kv_head, softmax_keys, tile, mine.staging, keys_of_tile);
        return keys_of_tile;
      });
      if (!computed) {
        finite = false;
        continue;
      }
      mine.moments.compute(task, kv_head, block_of_rows, mine.block);
      for (std::size_t row = 0; row < block_of_rows.size(); ++row)
        writer.write(mine.moments, static_cast<int>(row), block_of_rows[row]);
    }
  }
  interruption().require_all_done();
  if (!finite) throw Error{Refusal::input, "attention", "logits", "finite numbers", "NaN or Inf"};
  return result;
}

}  // namespace kvreplay
