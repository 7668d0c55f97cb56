// Kept moments of many sets from one pass over the attention of the eval queries. "Everything" is a set like the others
// and goes the same way, so a set that keeps all visible keys has its bits.
#include <algorithm>
#include <atomic>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <numbers>

#include "attention/cpu_backend.h"
#include "attention/distinct_sets.h"
#include "error.h"

namespace kvreplay {
namespace {

// Query rows of one block. More would pack the keys less often, and their exponentials would leave the second-level
// cache.
constexpr int block_rows = 48;
// Terms of a sum of exponentials below this, or their squares, may have been lost to underflow.
constexpr double smallest_safe_sum = 0x1p-40;

/// Whether the sums that metrics read beside the total have lost terms, though the total has not.
bool lost_parts(const RowSums& sums) {
  const auto lost = [](double sum) { return sum > 0 && sum < smallest_safe_sum; };
  return sums.total() >= smallest_safe_sum && (lost(sums.rest.sum) || lost(sums.sinks.sum + sums.rest.sum));
}

void compare_outputs(std::span<const double> kept, std::span<const double> full, Moments& moments) {
  for (std::size_t c = 0; c < kept.size(); ++c) {
    const double error = full[c] - kept[c];
    moments.output_square += kept[c] * kept[c];
    moments.output_dot += full[c] * kept[c];
    moments.error_square += error * error;
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
  if (query_count == 0) return result;
  assert(std::ranges::all_of(kept, [&](KeptSets sets) { return sets.size() == 1 || sets.size() == queries.size(); }));

  const Participants participants{.count = queries.back() + 1};
  const TileForm& form = form_of(kernels_, layer, participants);
  const std::vector<QueryPlace> places = query_places(layer, queries, participants);
  const DistinctSets distinct(kept, boundary);
  std::vector<NumberedSets> sets;
  std::vector<int> with_later{0};
  for (const KeptSets some : distinct.sets()) {
    const bool beyond = std::ranges::any_of(some, [&](const KeptSet& set) { return set.tokens() > boundary; });
    if (beyond) with_later.push_back(static_cast<int>(sets.size()));
    sets.push_back({some, beyond ? static_cast<int>(with_later.size()) - 1 : 0});
  }
  const MomentTask task{layer, boundary, parts, sets, with_later};
  const auto dim = static_cast<std::size_t>(layer.v.dim);
  std::atomic<bool> finite{true};

  // Logits of a row, in units of log 2, for sums that the exponentials around its reference cannot give.
  const auto logits_of = [&](int kv_head, const MomentRow& row) {
    const auto width = static_cast<std::size_t>(layer.k.dim);
    const double cap = static_cast<double>(layer.logit_softcap);
    std::vector<float> query(width), key(width);
    kernels_.widen(layer.q.row(row.head, row.place.stored), layer.q.dtype, layer.q.dim, query.data());
    std::vector<double> logits;
    for (int position = row.place.first; position < row.place.end; ++position) {
      kernels_.widen(layer.k.row(kv_head, position), layer.k.dtype, layer.k.dim, key.data());
      double logit = 0;
      for (std::size_t c = 0; c < width; ++c) logit += static_cast<double>(query[c]) * static_cast<double>(key[c]);
      logit *= static_cast<double>(layer.softmax_scale);
      logits.push_back((cap > 0 ? cap * std::tanh(logit / cap) : logit) * std::numbers::log2e);
    }
    return logits;
  };

  // A row whose kept keys all lie far below the largest logit: the same sums around the largest kept logit.
  const auto sums_from_logits = [&](int kv_head, const MomentRow& row, const KeptSet& set,
                                    std::span<const double> logits, double& highest, RowSums& sums,
                                    std::span<double> output) {
    const auto logit = [&](int key) { return logits[static_cast<std::size_t>(key - row.place.first)]; };
    highest = -HUGE_VAL;
    for (int key = row.place.first; key < row.place.end; ++key)
      if (row.holds(set, group, key)) highest = std::max(highest, logit(key));
    sums.sinks = sums.rest = sums.later = {};
    std::fill(output.begin(), output.end(), 0.0);
    std::vector<float> value(output.size());
    for (int key = row.place.first; key < row.place.end; ++key) {
      if (!row.holds(set, group, key)) continue;
      const double weight = std::exp2(logit(key) - highest);
      MaskedSums& of_section = key >= boundary ? sums.later : key < sink_tokens ? sums.sinks : sums.rest;
      of_section.sum += weight;
      of_section.square += weight * weight;
      if (output.empty()) continue;
      kernels_.widen(layer.v.row(kv_head, key), layer.v.dtype, layer.v.dim, value.data());
      for (std::size_t c = 0; c < value.size(); ++c) output[c] += weight * static_cast<double>(value[c]);
    }
    for (double& component : output) component /= sums.total();
  };

  const auto write_moments = [&](const MomentBlock& block, int number, const MomentRow& row, double reference) {
    const int kv_head = row.head / group;
    const std::size_t cell = product(row.head, query_count) + static_cast<std::size_t>(row.query);
    std::vector<double> full_output(parts.outputs ? dim : 0), output(full_output), logits;
    std::vector<RowSums> sums_of_set;
    for (std::size_t i = 0; i < sets.size(); ++i) sums_of_set.push_back(block.sums(number, static_cast<int>(i)));
    // Of a row, sums that are divided by each other's come from the same numbers.
    const bool all_from_logits = std::ranges::any_of(sums_of_set, lost_parts);
    // Fills `into`; what the sums are in units of.
    const auto complete = [&](std::size_t i, std::vector<double>& into) {
      RowSums& sums = sums_of_set[i];
      if (!all_from_logits && sums.total() >= smallest_safe_sum) {
        block.output(number, static_cast<int>(i), sums.total(), into);
        return 1.0;
      }
      if (logits.empty()) logits = logits_of(kv_head, row);
      double highest = 0;
      sums_from_logits(kv_head, row, sets[i].at(row.query), logits, highest, sums, into);
      return std::exp2(highest - reference);
    };
    const double full_unit = complete(0, full_output);
    const RowSums& full = sums_of_set.front();
    std::vector<Moments> of_set;
    for (std::size_t i = 0; i < sets.size(); ++i) {
      const double unit = i == 0 ? full_unit : complete(i, output);
      const RowSums& sums = sums_of_set[i];
      Moments& moments = of_set.emplace_back(moments_of(sums, full, unit / full_unit));
      compare_outputs(i == 0 ? full_output : output, full_output, moments);
      moments.logit_square = sums.logit_square * std::numbers::ln2 * std::numbers::ln2;
      const double full_total = full.total() * full_unit;
      moments.unaligned_dot = sums.unaligned_dot / (full_total * full_total);
    }
    result.full[cell] = of_set.front();
    for (std::size_t i = 0; i < kept.size(); ++i)
      result.kept[i * result.full.size() + cell] = of_set[static_cast<std::size_t>(distinct.number_of()[i])];
  };

  const int rows = group * query_count;
  const int blocks = (rows + block_rows - 1) / block_rows;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads_)
  for (int kv_head = 0; kv_head < layer.k.heads; ++kv_head) {
    for (int block = 0; block < blocks; ++block) {
      Scratch& mine = scratch();
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
        pack_keys(kernels_, form, layer, kv_head, participants, tile, mine.staging, keys_of_tile);
        return keys_of_tile;
      });
      if (!computed) {
        finite = false;
        continue;
      }
      mine.moments.compute(task, kv_head, block_of_rows, mine.block);
      for (std::size_t row = 0; row < block_of_rows.size(); ++row)
        write_moments(mine.moments, static_cast<int>(row), block_of_rows[row],
                      static_cast<double>(mine.block.tiles().reference[row]));
    }
  }
  if (!finite) throw Error{Refusal::input, "attention", "logits", "finite numbers", "others"};
  return result;
}

}  // namespace kvreplay
