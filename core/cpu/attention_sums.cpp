// Column sums of attention (Zhang et al. 2023, arXiv:2306.14048, eq. 2, and every windowed relative of it), one KV head
// after the other, so that memory beyond the trace stays O(n).
#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstddef>
#include <functional>

#include "attention/rope.h"
#include "cpu/cpu_backend.h"
#include "error.h"

namespace kvreplay {
namespace {

// Rows of one block: its exponentials stay in the second-level cache while their columns are added, as far as it goes,
// and take no more than this with many keys.
constexpr int block_rows = 48;
constexpr std::size_t block_bytes = std::size_t{12} << 20;
// So few rows of a KV head are cut into blocks of their own sizes, which pack keys for themselves, tile by tile as they
// use them, and heads run side by side.
constexpr int few_rows = 192;
constexpr int few_block_rows = 128;
constexpr int few_blocks = 2;
constexpr std::size_t few_block_bytes = std::size_t{32} << 20;
// Products of so few multiplications take less time than other threads to begin.
constexpr double multiplications_of_one_thread = 1 << 20;
// Pieces with sums of their own, for each KV head.
constexpr int most_segments = 32;

/// Blocks [begin, end) of the rows of one KV head, and where its sums lie: for each query head it meets, the columns of
/// the tiles that some of its rows reach.
struct Segment {
  int begin = 0;
  int end = 0;
  int first_head = 0;
  int heads = 0;
  int first_tile = 0;
  int tiles = 0;
  std::size_t first_partial = 0;  // in tiles
};

/// The rows of a KV head, head after head, in blocks; lists of places are those of one KV head each, or of all.
struct RowBlocks {
  std::span<const std::vector<QueryPlace>> places;
  int queries;
  int rows;
  int rows_per_block;

  int count() const { return (rows + rows_per_block - 1) / rows_per_block; }
};

/// Segments of about equal numbers of visible keys.
std::vector<Segment> cut_segments(const RowBlocks& blocks, int tile_keys, int column_tiles) {
  // Costs follow the first list; with a list for each KV head segments only balance a little worse.
  std::vector<double> cost(static_cast<std::size_t>(blocks.count()) + 1);
  for (int row = 0; row < blocks.rows; ++row) {
    const QueryPlace& place = blocks.places.front()[static_cast<std::size_t>(row % blocks.queries)];
    cost[static_cast<std::size_t>(row / blocks.rows_per_block) + 1] += static_cast<double>(place.end - place.first + 1);
  }
  for (std::size_t block = 1; block < cost.size(); ++block) cost[block] += cost[block - 1];

  std::vector<Segment> segments;
  const int wanted = std::min(blocks.count(), most_segments);
  int begin = 0;
  std::size_t partials = 0;
  for (int piece = 1; piece <= wanted; ++piece) {
    const double share = cost.back() * static_cast<double>(piece) / static_cast<double>(wanted);
    const auto cut = std::lower_bound(cost.begin(), cost.end(), share);
    const int end = piece == wanted ? blocks.count() : std::min(blocks.count(), static_cast<int>(cut - cost.begin()));
    if (end <= begin) continue;
    const int end_row = std::min(end * blocks.rows_per_block, blocks.rows);
    Segment segment{.begin = begin, .end = end, .first_head = begin * blocks.rows_per_block / blocks.queries};
    segment.heads = (end_row - 1) / blocks.queries - segment.first_head + 1;
    int first_key = column_tiles * tile_keys;
    int end_key = 0;
    for (int row = begin * blocks.rows_per_block; row < end_row; ++row) {
      for (const std::vector<QueryPlace>& places : blocks.places) {
        const QueryPlace& place = places[static_cast<std::size_t>(row % blocks.queries)];
        first_key = std::min(first_key, place.first);
        end_key = std::max(end_key, place.end);
      }
    }
    segment.first_tile = first_key / tile_keys;
    const int end_tile = std::min((end_key + tile_keys - 1) / tile_keys, column_tiles);
    segment.tiles = std::max(0, end_tile - segment.first_tile);
    segment.first_partial = partials;
    partials += product(segment.heads, segment.tiles);
    segments.push_back(segment);
    begin = end;
  }
  return segments;
}

/// Rows, `most` at most, whose exponentials take no more than `bytes`.
int rows_that_fit(std::size_t bytes, int keys, int most) {
  const std::size_t fit = bytes / (static_cast<std::size_t>(keys) * sizeof(float));
  return static_cast<int>(std::min(fit, static_cast<std::size_t>(most)));
}

/// Rows of a block where all are few: blocks of about one size, and two where there is but one KV head, for two threads
/// at least. More would read the keys more often.
int few_block(int rows, int keys, int kv_heads, int panel_rows) {
  const int most = std::max(panel_rows, rows_that_fit(few_block_bytes, keys, few_block_rows));
  const int shared = std::min((few_blocks + kv_heads - 1) / kv_heads, rows / (2 * panel_rows));
  const int blocks = std::max((rows + most - 1) / most, shared);
  return (rows + blocks - 1) / blocks;
}

int many_block(int keys, int panel_rows) {
  return std::max(panel_rows, rows_that_fit(block_bytes, keys, block_rows) / panel_rows * panel_rows);
}

/// The keys of each list of resident tokens: one for each KV head, or one for all.
std::vector<SoftmaxKeys> lists_of_keys(const AttentionSums& what, int keys) {
  if (what.resident.empty()) return {{.count = keys, .positions = Positions::original}};
  std::vector<SoftmaxKeys> lists;
  const std::size_t count = what.resident.size() / static_cast<std::size_t>(what.resident_rows);
  for (std::size_t row = 0; row < static_cast<std::size_t>(what.resident_rows); ++row)
    lists.push_back(
        {.count = keys, .resident = what.resident.subspan(row * count, count), .positions = what.positions});
  return lists;
}

/// By how much some key moves back; 0 if some key moves forward.
int farthest_back(std::span<const SoftmaxKeys> lists) {
  int farthest = 0;
  for (const SoftmaxKeys& list : lists)
    for (int key = 0; key < list.count; ++key) {
      if (list.moved(key) > 0) return 0;
      farthest = std::max(farthest, -list.moved(key));
    }
  return farthest;
}

/// Adds the columns of one block, whose exponentials are in `mine.block`, to the sums of its segment.
void add_columns(const TileKernels& kernels, ThreadScratch& mine, const AttentionSums& what, const Segment& segment,
                 int begin, int end, int column_tiles, double* into) {
  const bool counts = what.above_uniform > 0.0;
  const int queries = static_cast<int>(what.queries.size());
  float* factors = mine.factors.at_least(static_cast<std::size_t>(mine.block.tiles().panels * kernels.rows));
  for (int row = begin; row < end; ++row) {
    const QueryPlace& place = mine.rows[static_cast<std::size_t>(row - begin)].place;
    const double weight = counts                 ? (place.end - place.first) / what.above_uniform
                          : what.weights.empty() ? 1.0
                                                 : what.weights[static_cast<std::size_t>(row % queries)];
    const double sum = mine.block.row_sum(row - begin);
    factors[row - begin] = sum > 0.0 ? static_cast<float>(weight / sum) : 0.0F;
    if (!what.own_key && place.own >= 0) mine.block.exponential(row - begin, place.own) = 0.0F;
  }
  if (counts) {
    mine.block.count_above_one(factors);
    std::fill_n(factors, end - begin, 1.0F);
  }
  for (int tile = mine.block.first_tile(); tile < std::min(mine.block.end_tile(), column_tiles); ++tile) {
    double* tile_sums = into + product(tile - segment.first_tile, kernels.keys);
    for (int head = begin / queries; head * queries < end; ++head) {
      const int from = std::max(head * queries, begin) - begin;
      const int to = std::min((head + 1) * queries, end) - begin;
      kernels.add_columns(
          mine.block.tiles(), tile, from, to, factors,
          tile_sums + product(head - segment.first_head, segment.tiles) * static_cast<std::size_t>(kernels.keys));
    }
  }
}

/// Adds the segments' sums of one query head of its group, in their order.
void add_segments(std::span<const Segment> segments, int head, const double* partials, int tile_keys,
                  std::span<double> sums) {
  for (const Segment& segment : segments) {
    const int met = head - segment.first_head;
    if (met < 0 || met >= segment.heads) continue;
    const double* from =
        partials + (segment.first_partial + product(met, segment.tiles)) * static_cast<std::size_t>(tile_keys);
    const std::size_t begin = product(segment.first_tile, tile_keys);
    const std::size_t end = std::min(sums.size(), begin + product(segment.tiles, tile_keys));
    for (std::size_t column = begin; column < end; ++column) sums[column] += from[column - begin];
  }
}

}  // namespace

Matrix CpuBackend::attention_sums(const LayerTensors& layer, const AttentionSums& what) {
  assert(what.above_uniform == 0.0 || what.weights.empty());
  const int queries = static_cast<int>(what.queries.size());
  const bool all_take_part = what.resident.empty();
  const int columns =
      all_take_part ? what.columns : static_cast<int>(what.resident.size()) / std::max(1, what.resident_rows);
  Matrix sums(layer.q.heads, columns);
  if (queries == 0 || columns == 0) return sums;

  const int group = layer.group();
  const int kv_heads = layer.k.heads;
  const int keys = all_take_part ? what.queries.back() + 1 : columns;
  std::vector<SoftmaxKeys> lists = lists_of_keys(what, keys);
  BackwardRotation rotation;
  if (const int farthest = farthest_back(lists); farthest > 0) {
    rotation = {layer.rope, farthest};
    for (SoftmaxKeys& list : lists) list.rotation = &rotation;
  }
  std::vector<std::vector<QueryPlace>> places;
  for (const SoftmaxKeys& list : lists) places.push_back(query_places(layer, what.queries, list));
  const auto list_of = [&](int kv_head) { return static_cast<std::size_t>(lists.size() == 1 ? 0 : kv_head); };

  const int rows = group * queries;
  const bool few = rows <= few_rows;
  const RowBlocks blocks{places, queries, rows,
                         few ? few_block(rows, keys, kv_heads, kernels_.rows) : many_block(keys, kernels_.rows)};
  const int heads_at_once = few ? kv_heads : 1;
  const int key_tiles = (keys + kernels_.keys - 1) / kernels_.keys;
  const int column_tiles = std::min(key_tiles, (columns + kernels_.keys - 1) / kernels_.keys);
  const TileForm& form = form_of(kernels_, layer, lists.front());
  const std::size_t tile_cells = product(form.cells(layer.k.dim), kernels_.keys);

  const std::vector<Segment> segments = cut_segments(blocks, kernels_.keys, column_tiles);
  // Those with the last keys come first, so that a thread's buffers seldom have to grow.
  std::vector<const Segment*> by_reach;
  for (const Segment& segment : segments) by_reach.push_back(&segment);
  std::ranges::sort(by_reach, std::greater(), [](const Segment* of) { return of->first_tile + of->tiles; });
  const auto tile_columns = static_cast<std::size_t>(kernels_.keys);
  const std::size_t partials_a_head =
      (segments.back().first_partial + product(segments.back().heads, segments.back().tiles)) * tile_columns;
  float* packed = few ? nullptr : packed_keys_.at_least(static_cast<std::size_t>(key_tiles) * tile_cells);
  double* partials = partial_sums_.at_least(partials_a_head * static_cast<std::size_t>(heads_at_once));
  std::atomic<bool> finite{true};

  const auto add_block = [&](ThreadScratch& mine, int kv_head, const Segment& segment, int block, double* into) {
    const int begin = block * blocks.rows_per_block;
    const int end = std::min(begin + blocks.rows_per_block, rows);
    mine.rows.clear();
    for (int row = begin; row < end; ++row)
      mine.rows.push_back(
          {kv_head * group + row / queries, places[list_of(kv_head)][static_cast<std::size_t>(row % queries)]});
    mine.block.prepare(layer, form, mine.rows, false);
    const bool computed = mine.block.compute([&](int tile) -> const float* {
      if (packed != nullptr) return packed + static_cast<std::size_t>(tile) * tile_cells;
      float* keys_of_tile = mine.keys.at_least(tile_cells);
      pack_keys(kernels_, form, layer, kv_head, lists[list_of(kv_head)], tile, mine.staging, keys_of_tile);
      return keys_of_tile;
    });
    if (!computed) {
      finite = false;
    } else {
      add_columns(kernels_, mine, what, segment, begin, end, column_tiles, into);
    }
  };

  const double multiplications = static_cast<double>(rows) * kv_heads * keys * layer.q.dim;
#pragma omp parallel num_threads(multiplications < multiplications_of_one_thread ? 1 : threads_)
  for (int first_kv_head = 0; first_kv_head < kv_heads; first_kv_head += heads_at_once) {
    if (packed != nullptr) {
#pragma omp for schedule(static)
      for (int tile = 0; tile < key_tiles; ++tile) {
        pack_keys(kernels_, form, layer, first_kv_head, lists[list_of(first_kv_head)], tile, scratch().staging,
                  packed + static_cast<std::size_t>(tile) * tile_cells);
      }
    }
    // Which thread takes which segment changes nothing: every segment has its own sums.
#pragma omp for schedule(dynamic)
    for (int task = 0; task < heads_at_once * static_cast<int>(segments.size()); ++task) {
      const Segment& segment = *by_reach[static_cast<std::size_t>(task / heads_at_once)];
      const int head_offset = task % heads_at_once;
      double* into =
          partials + static_cast<std::size_t>(head_offset) * partials_a_head + segment.first_partial * tile_columns;
      std::fill_n(into, product(segment.heads, segment.tiles) * tile_columns, 0.0);
      for (int block = segment.begin; block < segment.end && !interruption().ended(); ++block)
        add_block(scratch(), first_kv_head + head_offset, segment, block, into);
    }
#pragma omp for schedule(static)
    for (int head = 0; head < heads_at_once * group; ++head)
      add_segments(segments, head % group, partials + static_cast<std::size_t>(head / group) * partials_a_head,
                   kernels_.keys, sums.row(first_kv_head * group + head));
  }
  interruption().require_all_done();
  if (!finite) throw Error{Refusal::input, "attention", "logits", "finite numbers", "NaN or Inf"};
  return sums;
}

}  // namespace kvreplay
