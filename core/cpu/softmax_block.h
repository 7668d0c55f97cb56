// A block of query rows of one KV head against the keys that take part, brought to exponentials and row sums.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/softmax_keys.h"
#include "cpu/aligned_buffer.h"
#include "cpu/tile.h"
#include "tensor.h"

namespace kvreplay {

/// The form in which the queries of a layer meet these keys: bfloat16 where the level has it, both are
/// stored so and none moves.
const TileForm& form_of(const TileKernels& kernels, const LayerTensors& layer, const SoftmaxKeys& softmax_keys);

struct BlockRow {
  int head = 0;
  QueryPlace place;
};

class SoftmaxBlock {
 public:
  explicit SoftmaxBlock(const TileKernels& kernels) : kernels_(kernels) {}

  /// Packs the queries, to meet keys packed in the same form.
  void prepare(const LayerTensors& layer, const TileForm& form, std::span<const BlockRow> rows, bool with_logits);

  /// keys_of(tile) -> packed keys. False if a logit is not a finite number.
  template <class KeysOf>
  bool compute(KeysOf keys_of) {
    if (attempt(keys_of)) return true;
    for (int tile = first_tile(); tile < end_tile_; ++tile) form_->raise_references(block_, keys_of(tile), tile);
    return attempt(keys_of);
  }

  /// out[row, key] = logits of all keys of the tiles [0, end_tile()), in place of compute(), where all rows begin with
  /// the first one; `stride` numbers a row.
  template <class KeysOf>
  void write_logits(KeysOf keys_of, std::size_t stride, float* out) {
    for (int tile = 0; tile < end_tile_; ++tile)
      form_->logits(block_, keys_of(tile), static_cast<std::ptrdiff_t>(stride),
                    out + static_cast<std::ptrdiff_t>(tile) * kernels_.keys);
  }

  const TileBlock& tiles() const { return block_; }
  int first_tile() const { return block_.first_tile; }
  int end_tile() const { return end_tile_; }
  /// Of the keys that the row sees and of its head's sink logit.
  double row_sum(int row) const { return block_.row_sums[row] + sink_weight(row); }
  /// Beside the row's exponentials.
  double sink_weight(int row) const;
  float& exponential(int row, int key);
  /// Exponentials that are above 1 when multiplied with their row's factor become 1, others 0.
  void count_above_one(const float* factors);

 private:
  template <class KeysOf>
  bool attempt(KeysOf keys_of) {
    begin_sums();
    for (int tile = first_tile(); tile < end_tile_; ++tile) {
      if (!form_->exponentials(block_, keys_of(tile), tile)) return false;
      if (tile % tiles_between_folds == tiles_between_folds - 1) kernels_.fold_row_sums(block_);
    }
    kernels_.fold_row_sums(block_);
    return all_sums_finite();
  }
  void pack_queries(const LayerTensors& layer, std::span<const BlockRow> rows);
  void begin_sums();
  bool all_sums_finite() const;

  const TileKernels& kernels_;
  const TileForm* form_ = nullptr;
  TileBlock block_;
  int end_tile_ = 0;
  AlignedBuffer<float> queries_, staging_, references_, lane_sums_, exponentials_, logits_;
  AlignedBuffer<std::int32_t> first_, end_;
  AlignedBuffer<PanelRange> ranges_;
  AlignedBuffer<bool> settled_;
  AlignedBuffer<double> row_sums_;
  std::vector<double> sinks_;  // [rows] in units of log 2; empty: none
};

/// Exponentials of rows of logits, whose references are raised together where one has to be. False if a logit is not a
/// finite number.
bool compute_rows(const TileKernels& kernels, std::span<LogitRow> rows);
/// sums[key - first] += weight * softmax(logits)[key] for the keys that a row sees, after compute_rows(). `sink`: a
/// logit that takes part, in units of 1; -infinity: none.
void add_softmax(const TileKernels& kernels, const LogitRow& row, double weight, double sink, double* sums);
/// largest[key - first] = softmax(logits)[key] where that is larger, likewise.
void raise_to_softmax(const TileKernels& kernels, const LogitRow& row, double sink, double* largest);

/// Packs one tile of keys of a KV head, moved to their slots where asked, and has the memory fetch those of the next.
/// The last key stands for those that are missing.
void pack_keys(const TileKernels& kernels, const TileForm& form, const LayerTensors& layer, int kv_head,
               const SoftmaxKeys& softmax_keys, int tile, AlignedBuffer<float>& staging, float* out);

/// The keys of a softmax of one KV head, packed once for many queries.
class PackedKeys {
 public:
  PackedKeys(const TileKernels& kernels, const LayerTensors& layer, int kv_head, const SoftmaxKeys& softmax_keys);

  /// Numbers of a row of logits: whole tiles.
  std::size_t stride() const { return stride_; }
  /// out[row, key] = logits of all keys up to the last one that any of the rows sees, in whole tiles; `stride` numbers
  /// a row. The rows are of queries of the same layer; `block` is to work in.
  void write_logits(const LayerTensors& layer, std::span<const BlockRow> rows, std::size_t stride, SoftmaxBlock& block,
                    float* out) const;

 private:
  const TileForm& form_;
  std::size_t stride_;
  std::size_t tile_cells_;
  AlignedBuffer<float> packed_;  // [tiles, cells, keys of a tile]
};

}  // namespace kvreplay
