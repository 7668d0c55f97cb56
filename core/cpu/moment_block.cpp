#include "cpu/moment_block.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>

namespace kvreplay {
namespace {

constexpr int chunk_keys = MomentKernels::chunk_keys;
constexpr int chunk_words = MomentKernels::chunk_words;
constexpr int row_stride = MomentKernels::row_stride;
// What a kernel may write past the last number of a chunk.
constexpr int longest_vector = 16;

bool same_mask(const std::uint64_t* a, const std::uint64_t* b) { return a == b || std::equal(a, a + chunk_words, b); }

}  // namespace

bool MomentRow::holds_any(const KeptSet& set, int group, int begin, int end) const {
  for (int key = std::max(begin, place.first); key < std::min(end, place.end); ++key)
    if (holds(set, group, key)) return true;
  return false;
}

void MomentBlock::begin(const MomentTask& task, int kv_head, std::span<const MomentRow> rows, SoftmaxBlock& softmax) {
  task_ = &task;
  softmax_ = &softmax;
  rows_ = rows;
  kv_head_ = kv_head;
  row_count_ = static_cast<int>(rows.size());
  set_count_ = static_cast<int>(task.sets.size());
  padded_rows_ = (row_count_ + kernels_.rows - 1) / kernels_.rows * kernels_.rows;
  padded_dim_ = (task.layer.v.dim + kernels_.columns - 1) / kernels_.columns * kernels_.columns;
  visible_ = {std::numeric_limits<int>::max(), 0};
  for (const MomentRow& some : rows)
    visible_ = {std::min(visible_.begin, some.place.first), std::max(visible_.end, some.place.end)};
  all_sets_.resize(task.sets.size());
  std::iota(all_sets_.begin(), all_sets_.end(), 0);

  const int later_count = static_cast<int>(task.with_later.size());
  const std::size_t cells = product(row_count_, set_count_);
  const std::size_t later_cells = product(row_count_, later_count);
  MaskedSums* sums = sums_.at_least(2 * cells + later_cells);
  std::fill_n(sums, 2 * cells + later_cells, MaskedSums{});
  double* values = nullptr;
  double* later_values = nullptr;
  if (task.parts.outputs) {
    const std::size_t of_set = product(padded_rows_, padded_dim_);
    const std::size_t all = static_cast<std::size_t>(set_count_ + later_count) * of_set;
    values = value_sums_.at_least(all);
    later_values = values + static_cast<std::size_t>(set_count_) * of_set;
    std::fill_n(values, all, 0.0);
    values_.at_least(product(chunk_keys, padded_dim_));
  }
  if (task.parts.logits) {
    logits_.at_least(product(row_count_, row_stride));
    std::fill_n(logit_sums_.at_least(cells), cells, MaskedSums{});
  }
  if (task.parts.unaligned) {
    std::fill_n(ranks_.at_least(cells), cells, 0);
    std::fill_n(unaligned_dots_.at_least(cells), cells, 0.0);
    gathered_.at_least(chunk_keys + longest_vector);
    at_ranks_.at_least(chunk_keys + longest_vector);
  }
  const int sinks = std::min(sink_tokens, task.boundary);
  sections_ = {
      {{0, sinks}, all_sets_, sums, values},
      {{sinks, task.boundary}, all_sets_, sums + cells, values},
      {{task.boundary, std::numeric_limits<int>::max()}, task.with_later, sums + 2 * cells, later_values, false}};
  masks_.at_least(cells);
  own_masks_.at_least(cells * chunk_words);
  masked_.at_least(product(kernels_.rows, row_stride));
  float* weights = weights_.at_least(product(padded_rows_, row_stride));
  std::fill_n(weights + product(row_count_, row_stride), product(padded_rows_ - row_count_, row_stride), 0.0F);
}

void MomentBlock::compute(const MomentTask& task, int kv_head, std::span<const MomentRow> rows, SoftmaxBlock& softmax) {
  begin(task, kv_head, rows, softmax);
  for (int first = visible_.begin / chunk_keys * chunk_keys; first < visible_.end; first += chunk_keys) {
    const KeyRange chunk{first, first + chunk_keys};
    for (int number = 0; number < row_count_; ++number) {
      copy_visible(softmax.tiles().exponentials, number, chunk, weights_.data() + product(number, row_stride));
      if (task.parts.logits)
        copy_visible(softmax.tiles().logits, number, chunk, logits_.data() + product(number, row_stride));
    }
    if (task.parts.outputs) widen_values(std::max(first, visible_.begin), std::min(chunk.end, visible_.end));
    for (const Section& section : sections_) add_section(section, first);
  }
}

void MomentBlock::add_section(const Section& section, int chunk) {
  const KeyRange range{std::max(section.keys.begin, chunk), std::min(section.keys.end, chunk + chunk_keys)};
  if (range.begin >= std::min(range.end, visible_.end)) return;
  find_masks(section.sets, chunk, range);
  const int count = static_cast<int>(section.sets.size());
  for (int number = 0; number < row_count_; ++number) {
    const std::uint64_t* const* masks = masks_.data() + product(number, count);
    const std::size_t at = product(number, row_stride);
    kernels_.add_masked_sums(weights_.data() + at, masks, count, section.sums + product(number, count));
    if (task_->parts.logits && section.below_boundary)
      kernels_.add_masked_sums(logits_.data() + at, masks, count, logit_sums_.data() + product(number, count));
  }
  if (task_->parts.unaligned && section.below_boundary) add_unaligned();
  if (task_->parts.outputs) add_values(section);
}

/// Numbers of the keys in `range`, which lie in tiles; 0 where the row does not see the key.
void MomentBlock::copy_visible(const float* of_tiles, int number, KeyRange range, float* out) {
  const QueryPlace& place = row(number).place;
  const int begin = std::clamp(place.first, range.begin, range.end);
  const int end = std::clamp(place.end, begin, range.end);
  std::fill(out, out + (begin - range.begin), 0.0F);
  std::fill(out + (end - range.begin), out + (range.end - range.begin), 0.0F);
  for (int key = begin; key < end;) {
    const int stop = std::min(end, (key / tiles_.keys + 1) * tiles_.keys);
    const float* from = of_tiles + (&softmax_->exponential(number, key) - softmax_->tiles().exponentials);
    std::copy(from, from + (stop - key), out + (key - range.begin));
    key = stop;
  }
}

/// A row whose masks are not the set's alone: it does not see all the keys, or has its own among them.
bool MomentBlock::is_odd(const MomentRow& some, KeyRange range) const {
  const QueryPlace& place = some.place;
  return place.first > range.begin || place.end < range.end || (place.own >= range.begin && place.own < range.end);
}

/// Masks of the chunk for each row and each of `sets`: keys of `range` that the row sees and holds.
void MomentBlock::find_masks(std::span<const int> sets, int chunk, KeyRange range) {
  const std::size_t count = sets.size();
  const std::uint64_t** masks = masks_.data();
  const bool whole_chunk = range.end - range.begin == chunk_keys;
  bool before_is_odd = true;
  for (int number = 0; number < row_count_; ++number, masks += count) {
    const MomentRow& some = row(number);
    const bool odd = is_odd(some, range);
    const bool like_before = !odd && !before_is_odd && some.head == row(number - 1).head;
    before_is_odd = odd;
    for (std::size_t i = 0; i < count; ++i) {
      const NumberedSets& of_queries = task_->sets[static_cast<std::size_t>(sets[i])];
      if (like_before && of_queries.one_for_all()) {
        masks[i] = *(masks + i - count);
        continue;
      }
      const KeptSet& set = of_queries.at(some.query);
      const std::uint64_t* kept = set.row_bits(set.row_of(some.head, task_->layer.group())).data() + chunk / 64;
      if (!odd && whole_chunk && range.end <= set.tokens()) {
        masks[i] = kept;
        continue;
      }
      std::uint64_t* own = own_masks_.data() + (product(number, static_cast<int>(count)) + i) * chunk_words;
      const int first = std::max(range.begin, some.place.first);
      const int end = std::min(range.end, some.place.end);
      for (int w = 0; w < chunk_words; ++w) {
        const int word = chunk + 64 * w;
        own[w] = held_keys(word < set.tokens() ? kept[w] : 0, word, set.tokens(), some.place.own, first, end);
      }
      masks[i] = own;
    }
  }
}

/// Weights of the keys that a set holds, beside those of the keys whose numbers are their ranks.
void MomentBlock::add_unaligned() {
  for (int number = 0; number < row_count_; ++number) {
    for (int set = 0; set < set_count_; ++set) {
      const std::size_t at = cell(number, set);
      const int held =
          kernels_.gather(weights_.data() + product(number, row_stride), masks_.data()[at], gathered_.data());
      const int rank = ranks_.data()[at];
      copy_visible(softmax_->tiles().exponentials, number, {rank, rank + held}, at_ranks_.data());
      unaligned_dots_.data()[at] += kernels_.dot(gathered_.data(), at_ranks_.data(), held);
      ranks_.data()[at] = rank + held;
    }
  }
}

void MomentBlock::widen_values(int begin, int end) {
  const TensorView& values = task_->layer.v;
  for (int key = begin; key < end; ++key) {
    float* vector = values_.data() + product(key % chunk_keys, padded_dim_);
    tiles_.widen(values.row(kv_head_, key), values.dtype, values.dim, vector);
    std::fill(vector + values.dim, vector + padded_dim_, 0.0F);
  }
}

void MomentBlock::add_values(const Section& section) {
  const int count = static_cast<int>(section.sets.size());
  std::uint64_t listed[chunk_words] = {};
  keys_.clear();
  for (int i = 0; i < count; ++i) {
    for (int first = 0; first < row_count_; first += kernels_.rows) {
      const int end = std::min(first + kernels_.rows, row_count_);
      const auto mask_of = [&](int number) {
        return masks_.data()[product(number, count) + static_cast<std::size_t>(i)];
      };
      bool alike = true;
      for (int number = first + 1; number < end; ++number) alike = alike && same_mask(mask_of(number), mask_of(first));
      const float* weights = weights_.data() + product(first, row_stride);
      std::uint64_t wanted[chunk_words];
      std::copy_n(mask_of(first), chunk_words, wanted);
      if (!alike) {
        // Rows that hold different keys go over those that some row holds, with weights of zero where one lacks them.
        std::fill_n(masked_.data(), product(kernels_.rows, row_stride), 0.0F);
        for (int number = first; number < end; ++number) {
          const std::size_t at = product(number - first, row_stride);
          kernels_.apply_mask(weights + at, mask_of(number), masked_.data() + at);
          for (int w = 0; w < chunk_words; ++w) wanted[w] |= mask_of(number)[w];
        }
        weights = masked_.data();
      }
      if (!same_mask(wanted, listed)) {
        std::copy_n(wanted, chunk_words, listed);
        keys_.clear();
        for_bits(wanted, [&](int key) { keys_.push_back(key); });
      }
      const std::size_t at = static_cast<std::size_t>(i) * product(padded_rows_, padded_dim_);
      if (!keys_.empty())
        kernels_.add_weighted_values(weights, values_.data(), keys_.data(), static_cast<int>(keys_.size()), padded_dim_,
                                     section.values + at + product(first, padded_dim_));
    }
  }
}

RowSums MomentBlock::sums(int number, int set) const {
  const std::size_t at = cell(number, set);
  const Section& later = sections_[2];
  RowSums sums;
  sums.sink_logit = softmax_->sink_weight(number);
  sums.sinks = sections_[0].sums[at];
  sums.rest = sections_[1].sums[at];
  sums.later = later.sums[product(number, static_cast<int>(later.sets.size())) +
                          static_cast<std::size_t>(task_->sets[static_cast<std::size_t>(set)].later)];
  if (task_->parts.logits) sums.logit_square = logit_sums_.data()[at].square;
  if (task_->parts.unaligned) sums.unaligned_dot = unaligned_dots_.data()[at];
  return sums;
}

void MomentBlock::output(int number, int set, double total, std::span<double> out) const {
  if (out.empty()) return;
  const std::size_t of_set = product(padded_rows_, padded_dim_);
  const std::size_t at = product(number, padded_dim_);
  const auto later = static_cast<std::size_t>(task_->sets[static_cast<std::size_t>(set)].later);
  const double* below = sections_[0].values + static_cast<std::size_t>(set) * of_set + at;
  const double* above = sections_[2].values + later * of_set + at;
  for (std::size_t c = 0; c < out.size(); ++c) out[c] = (below[c] + above[c]) / total;
}

}  // namespace kvreplay
