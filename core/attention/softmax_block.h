// A block of query rows of one KV head against the keys that take part, brought to exponentials and row sums.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/aligned_buffer.h"
#include "attention/backend.h"
#include "attention/tile.h"
#include "trace/tensor.h"

namespace kvreplay {

/// The keys that take part in a softmax: all of [0, count), or a resident list in which the keys that a query sees
/// stand side by side.
struct Participants {
  int count = 0;
  std::span<const std::int32_t> resident = {};  // [count], or empty
  Positions positions = Positions::original;

  int position(int key) const { return resident.empty() ? key : resident[static_cast<std::size_t>(key)]; }
  /// By how much a key moves from where it was captured.
  int moved(int key) const { return positions == Positions::cache ? key - position(key) : 0; }
};

/// A query and what it sees of the participants.
struct QueryPlace {
  int stored = 0;  // number among the stored queries
  int first = 0;   // sees [first, end)
  int end = 0;
  int own = -1;   // its own key, -1 if that does not take part
  int moved = 0;  // from where it was captured
};

/// Places of `queries` (positions). Throws Error{input} where a query is not stored, Error{usage} where a query must
/// move to its slot and has none, or where the keys that it sees do not stand side by side.
std::vector<QueryPlace> query_places(const LayerTensors& layer, std::span<const std::int32_t> queries,
                                     const Participants& participants);

struct BlockRow {
  int head = 0;
  QueryPlace place;
};

class SoftmaxBlock {
 public:
  explicit SoftmaxBlock(const TileKernels& kernels) : kernels_(kernels) {}

  /// Packs the queries; rows are padded to whole panels with copies of the last one.
  void prepare(const LayerTensors& layer, std::span<const BlockRow> rows, bool with_logits);

  /// keys_of(tile) -> packed keys. False if a logit is not a finite number.
  template <class KeysOf>
  bool compute(KeysOf keys_of) {
    if (attempt(keys_of)) return true;
    for (int tile = first_tile(); tile < end_tile_; ++tile) kernels_.raise_references(block_, keys_of(tile), tile);
    return attempt(keys_of);
  }

  const TileBlock& tiles() const { return block_; }
  int first_tile() const { return block_.first_tile; }
  int end_tile() const { return end_tile_; }
  double row_sum(int row) const { return block_.row_sums[row]; }
  float& exponential(int row, int key);

 private:
  template <class KeysOf>
  bool attempt(KeysOf keys_of) {
    begin_sums();
    for (int tile = first_tile(); tile < end_tile_; ++tile) {
      if (!kernels_.exponentials(block_, keys_of(tile), tile)) return false;
      if (tile % tiles_between_folds == tiles_between_folds - 1) kernels_.fold_row_sums(block_);
    }
    kernels_.fold_row_sums(block_);
    return true;
  }
  void begin_sums();

  static constexpr int tiles_between_folds = 32;

  const TileKernels& kernels_;
  TileBlock block_;
  int end_tile_ = 0;
  AlignedBuffer<float> queries_, staging_, references_, lane_sums_, exponentials_, logits_;
  AlignedBuffer<std::int32_t> first_, end_, exponent_;
  AlignedBuffer<PanelRange> ranges_;
  AlignedBuffer<bool> settled_;
  AlignedBuffer<double> row_sums_;
};

/// Packs one tile of keys of a KV head, widened and moved to their slots where asked.
void pack_keys(const TileKernels& kernels, const LayerTensors& layer, int kv_head, const Participants& participants,
               int tile, AlignedBuffer<float>& staging, float* out);

}  // namespace kvreplay
