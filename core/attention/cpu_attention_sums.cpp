// Column sums of attention (Zhang et al. 2023, arXiv:2306.14048, eq. 2, and every windowed relative of it), one KV head
// after the other, so that memory beyond the trace stays O(n).
#include <algorithm>
#include <atomic>
#include <cstddef>

#include "attention/cpu_backend.h"
#include "error.h"

namespace kvreplay {
namespace {

// Rows of one block: exponentials of a block stay in the second-level cache while their columns are added.
constexpr int block_rows = 48;
// So few rows of a KV head are one block: its keys are packed tile by tile as they are used, and heads run side by
// side.
constexpr int few_rows = 192;
// Pieces with sums of their own, for each KV head.
constexpr int most_segments = 32;

/// Blocks [begin, end) of the rows of one KV head, and where its sums lie: one run of columns for each query head it
/// meets.
struct Segment {
  int begin = 0;
  int end = 0;
  int first_head = 0;
  int heads = 0;
  int first_partial = 0;
};

/// Segments of about equal numbers of visible keys.
std::vector<Segment> cut_segments(std::span<const QueryPlace> places, int group, int rows_per_block) {
  const int queries = static_cast<int>(places.size());
  const int rows = group * queries;
  const int blocks = (rows + rows_per_block - 1) / rows_per_block;
  std::vector<double> cost(static_cast<std::size_t>(blocks) + 1);
  for (int row = 0; row < rows; ++row) {
    const QueryPlace& place = places[static_cast<std::size_t>(row % queries)];
    cost[static_cast<std::size_t>(row / rows_per_block) + 1] += static_cast<double>(place.end - place.first + 1);
  }
  for (std::size_t block = 1; block < cost.size(); ++block) cost[block] += cost[block - 1];

  std::vector<Segment> segments;
  const int wanted = std::min(blocks, most_segments);
  int begin = 0;
  int partials = 0;
  for (int piece = 1; piece <= wanted; ++piece) {
    const double share = cost.back() * static_cast<double>(piece) / static_cast<double>(wanted);
    const auto cut = std::lower_bound(cost.begin(), cost.end(), share);
    const int end = piece == wanted ? blocks : std::min(blocks, static_cast<int>(cut - cost.begin()));
    if (end <= begin) continue;
    Segment segment{
        .begin = begin, .end = end, .first_head = begin * rows_per_block / queries, .first_partial = partials};
    segment.heads = (std::min(end * rows_per_block, rows) - 1) / queries - segment.first_head + 1;
    segments.push_back(segment);
    partials += segment.heads;
    begin = end;
  }
  return segments;
}

}  // namespace

Matrix CpuBackend::attention_sums(const LayerTensors& layer, const AttentionSums& what) {
  const int queries = static_cast<int>(what.queries.size());
  const bool all_take_part = what.resident.empty();
  const int columns =
      all_take_part ? what.columns : static_cast<int>(what.resident.size()) / std::max(1, what.resident_rows);
  Matrix sums(layer.q.heads, columns);
  if (queries == 0 || columns == 0) return sums;

  const int group = layer.group();
  const int kv_heads = layer.k.heads;
  const int keys = all_take_part ? what.queries.back() + 1 : columns;
  std::vector<Participants> participants;
  std::vector<std::vector<QueryPlace>> places;
  for (int row = 0; row < (all_take_part ? 1 : what.resident_rows); ++row) {
    Participants some{.count = keys, .positions = all_take_part ? Positions::original : what.positions};
    if (!all_take_part) {
      const auto count = static_cast<std::size_t>(columns);
      some.resident = what.resident.subspan(static_cast<std::size_t>(row) * count, count);
    }
    participants.push_back(some);
    places.push_back(query_places(layer, what.queries, some));
  }
  const auto row_of = [&](int kv_head) { return static_cast<std::size_t>(participants.size() == 1 ? 0 : kv_head); };

  const int rows = group * queries;
  const bool few = rows <= few_rows;
  const int rows_per_block = few ? rows : block_rows;
  const int heads_at_once = few ? kv_heads : 1;
  const int key_tiles = (keys + kernels_.keys - 1) / kernels_.keys;
  const int column_tiles = std::min(key_tiles, (columns + kernels_.keys - 1) / kernels_.keys);
  const std::size_t tile_floats = static_cast<std::size_t>(layer.k.dim) * static_cast<std::size_t>(kernels_.keys);
  const std::size_t partial_columns = static_cast<std::size_t>(column_tiles) * static_cast<std::size_t>(kernels_.keys);

  // Segments follow the places of the first list; with a list for each KV head they only balance a little worse.
  const std::vector<Segment> segments = cut_segments(places.front(), group, rows_per_block);
  const int segment_count = static_cast<int>(segments.size());
  const int partials_a_head = segments.back().first_partial + segments.back().heads;
  float* packed = few ? nullptr : packed_keys_.at_least(static_cast<std::size_t>(key_tiles) * tile_floats);
  double* partials = partial_sums_.at_least(static_cast<std::size_t>(partials_a_head) *
                                            static_cast<std::size_t>(heads_at_once) * partial_columns);
  std::atomic<bool> finite{true};

  const auto add_block = [&](Scratch& mine, int kv_head, const Segment& segment, int block, double* into) {
    const std::span<const QueryPlace> own_places = places[row_of(kv_head)];
    const Participants& own_participants = participants[row_of(kv_head)];
    const int begin = block * rows_per_block;
    const int end = std::min(begin + rows_per_block, rows);
    mine.rows.clear();
    for (int row = begin; row < end; ++row) {
      mine.rows.push_back({kv_head * group + row / queries, own_places[static_cast<std::size_t>(row % queries)]});
    }
    mine.block.prepare(layer, mine.rows, false);
    const bool computed = mine.block.compute([&](int tile) -> const float* {
      if (packed != nullptr) return packed + static_cast<std::size_t>(tile) * tile_floats;
      float* keys_of_tile = mine.keys.at_least(tile_floats);
      pack_keys(kernels_, layer, kv_head, own_participants, tile, mine.staging, keys_of_tile);
      return keys_of_tile;
    });
    if (!computed) {
      finite = false;
      return;
    }
    float* factors = mine.factors.at_least(static_cast<std::size_t>(mine.block.tiles().panels * kernels_.rows));
    for (int row = begin; row < end; ++row) {
      const double weight = what.weights.empty() ? 1.0 : what.weights[static_cast<std::size_t>(row % queries)];
      const double sum = mine.block.row_sum(row - begin);
      factors[row - begin] = sum > 0.0 ? static_cast<float>(weight / sum) : 0.0F;
      const int own = mine.rows[static_cast<std::size_t>(row - begin)].place.own;
      if (!what.own_key && own >= 0) mine.block.exponential(row - begin, own) = 0.0F;
    }
    for (int head = begin / queries; head * queries < end; ++head) {
      double* head_columns = into + static_cast<std::size_t>(head - segment.first_head) * partial_columns;
      const int from = std::max(head * queries, begin) - begin;
      const int to = std::min((head + 1) * queries, end) - begin;
      for (int tile = mine.block.first_tile(); tile < std::min(mine.block.end_tile(), column_tiles); ++tile) {
        kernels_.add_columns(mine.block.tiles(), tile, from, to, factors, head_columns + tile * kernels_.keys);
      }
    }
  };

#pragma omp parallel num_threads(threads_)
  for (int first_kv_head = 0; first_kv_head < kv_heads; first_kv_head += heads_at_once) {
    if (packed != nullptr) {
#pragma omp for schedule(static)
      for (int tile = 0; tile < key_tiles; ++tile) {
        pack_keys(kernels_, layer, first_kv_head, participants[row_of(first_kv_head)], tile, scratch().staging,
                  packed + static_cast<std::size_t>(tile) * tile_floats);
      }
    }
    // Which thread takes which segment changes nothing: every segment has its own sums.
#pragma omp for schedule(dynamic)
    for (int task = 0; task < heads_at_once * segment_count; ++task) {
      const Segment& segment = segments[static_cast<std::size_t>(task % segment_count)];
      const int head_offset = task / segment_count;
      double* into =
          partials + static_cast<std::size_t>(head_offset * partials_a_head + segment.first_partial) * partial_columns;
      std::fill_n(into, static_cast<std::size_t>(segment.heads) * partial_columns, 0.0);
      for (int block = segment.begin; block < segment.end; ++block) {
        add_block(scratch(), first_kv_head + head_offset, segment, block, into);
      }
    }
#pragma omp for schedule(static)
    for (int head = 0; head < heads_at_once * group; ++head) {
      const std::span<double> out = sums.row(first_kv_head * group + head);
      for (const Segment& segment : segments) {
        const int met = head % group - segment.first_head;
        if (met < 0 || met >= segment.heads) continue;
        const double* from =
            partials +
            static_cast<std::size_t>(head / group * partials_a_head + segment.first_partial + met) * partial_columns;
        for (std::size_t column = 0; column < std::min(out.size(), partial_columns); ++column)
          out[column] += from[column];
      }
    }
  }
  if (!finite) throw Error{Refusal::input, "attention", "logits", "finite numbers", "others"};
  return sums;
}

}  // namespace kvreplay
