// The sums that kept moments are made of, of a block of query rows of one KV head and many kept sets.
//
// Of each chunk of keys a row's weights are read once, and every set sums them under the mask of what it holds.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/backend.h"
#include "attention/row_sums.h"
#include "cpu/aligned_buffer.h"
#include "cpu/moment_kernels.h"
#include "cpu/softmax_block.h"
#include "tensor.h"

namespace kvreplay {

/// Kept sets, one for all queries or one for each, and where their sums from the boundary on are found: number 0 is
/// with those of all visible keys, which is where they are unless the sets go beyond the boundary.
struct NumberedSets {
  KeptSets kept;
  int later = 0;

  bool one_for_all() const { return kept.size() == 1; }
  const KeptSet& at(int query) const { return kept[one_for_all() ? 0 : static_cast<std::size_t>(query)]; }
};

/// A query head and the number of an eval query.
struct MomentRow {
  int head = 0;
  int query = 0;
  QueryPlace place;

  /// Whether the row's own key is `key`, or its set keeps it or does not cover it.
  bool holds(const KeptSet& set, int group, int key) const {
    return key == place.own || key >= set.tokens() || set.keeps(set.row_of(head, group), key);
  }
  /// Of the keys [begin, end) that it sees.
  bool holds_any(const KeptSet& set, int group, int begin, int end) const;
};

/// What is the same for all blocks of a call. The first of `sets` keeps all below the boundary.
struct MomentTask {
  const LayerTensors& layer;
  int boundary = 0;
  MomentParts parts;
  std::span<const NumberedSets> sets;
  std::vector<int> with_later = {0};  // of `sets`: those that have sums of their own from the boundary on
};

class MomentBlock {
 public:
  MomentBlock(const TileKernels& tiles, const MomentKernels& kernels) : tiles_(tiles), kernels_(kernels) {}

  /// `softmax` has computed the same rows. Everything must outlive the reading of sums.
  void compute(const MomentTask& task, int kv_head, std::span<const MomentRow> rows, SoftmaxBlock& softmax);

  RowSums sums(int row, int set) const;
  /// out[dim] = Σ weight * value / total; nothing where outputs are not asked for.
  void output(int row, int set, double total, std::span<double> out) const;

 private:
  struct KeyRange {
    int begin = 0;
    int end = 0;
  };
  /// Keys whose sums are kept apart, and the sets that have such sums.
  struct Section {
    KeyRange keys;
    std::span<const int> sets;
    MaskedSums* sums = nullptr;  // [rows, sets]
    double* values = nullptr;    // [sets, padded rows, padded dim]
    bool below_boundary = true;
  };

  void begin(const MomentTask& task, int kv_head, std::span<const MomentRow> rows, SoftmaxBlock& softmax);
  void add_section(const Section& section, int chunk);
  void copy_visible(const float* of_tiles, int row, KeyRange range, float* out);
  void find_masks(std::span<const int> sets, int chunk, KeyRange range);
  void add_unaligned();
  void add_values(const Section& section);
  void widen_values(int begin, int end);
  bool is_odd(const MomentRow& row, KeyRange range) const;
  const MomentRow& row(int number) const { return rows_[static_cast<std::size_t>(number)]; }
  std::size_t cell(int row, int set) const { return product(row, set_count_) + static_cast<std::size_t>(set); }

  const TileKernels& tiles_;
  const MomentKernels& kernels_;

  const MomentTask* task_ = nullptr;
  SoftmaxBlock* softmax_ = nullptr;
  std::span<const MomentRow> rows_;
  int kv_head_ = 0;
  int row_count_ = 0;
  int set_count_ = 0;
  int padded_rows_ = 0;
  int padded_dim_ = 0;
  KeyRange visible_;  // that some row sees
  std::vector<Section> sections_;
  std::vector<int> all_sets_;
  std::vector<std::int32_t> keys_;  // of a chunk that some set holds

  AlignedBuffer<float> weights_, logits_;      // [padded rows, row_stride] of the chunk under way
  AlignedBuffer<float> masked_;                // [kernel's rows, row_stride]
  AlignedBuffer<float> gathered_, at_ranks_;   // [chunk_keys + a vector]
  AlignedBuffer<float> values_;                // [chunk_keys, padded dim]
  AlignedBuffer<std::uint64_t> own_masks_;     // [rows, sets, chunk_words]
  AlignedBuffer<const std::uint64_t*> masks_;  // [rows, sets]
  AlignedBuffer<MaskedSums> sums_, logit_sums_;
  AlignedBuffer<double> value_sums_, unaligned_dots_;
  AlignedBuffer<std::int32_t> ranks_;  // [rows, sets] keys below the chunk that the row sees and the set holds
};

}  // namespace kvreplay
