#include "observables/reconstruction.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include "cpu/aligned_buffer.h"
#include "cpu/softmax_block.h"
#include "cpu/tile.h"
#include "error.h"
#include "positions.h"

namespace kvreplay {
namespace {

// Queries of a piece of work: enough that packing its keys costs little beside.
constexpr int queries_a_piece = 256;
// Rows whose logits are computed at once.
constexpr int block_rows = 48;

/// Some queries of a pass, [begin, end) among its tokens, of one KV head.
struct Piece {
  std::size_t pass = 0;
  int begin = 0;
  int end = 0;
  int kv_head = 0;
};

std::vector<Piece> pieces_of(std::span<const ReconstructionPass> passes, int kv_heads) {
  std::vector<Piece> pieces;
  for (std::size_t pass = 0; pass < passes.size(); ++pass)
    for (int begin = 0; begin < passes[pass].tokens(); begin += queries_a_piece)
      for (int head = 0; head < kv_heads; ++head)
        pieces.push_back({pass, begin, std::min(begin + queries_a_piece, passes[pass].tokens()), head});
  return pieces;
}

std::vector<std::int32_t> positions_of(const PassTokens& read) {
  std::vector<std::int32_t> positions = position_range(0, read.sinks);
  std::ranges::copy(position_range(read.first, read.end), std::back_inserter(positions));
  return positions;
}

/// The keys that a piece reads: keys of the prompt, and after them the keys of its pass.
class KeysOfPiece {
 public:
  KeysOfPiece(const LayerView& view, const Piece& piece, const PassTokens& read)
      : view_(view),
        piece_(piece),
        read_(read),
        begin_(view.place().reconstruction.passes[piece.pass].begin),
        kernels_(tile_kernels()),
        prompt_(with_keys(view.tensors().k)),
        pass_(with_keys(view.place().reconstruction.k)),
        positions_(positions_of(read)),
        prompt_keys_(packed(prompt_, positions_)),
        pass_keys_(packed(pass_, position_range(begin_, begin_ + piece.end))) {}

  /// [group, P]: the largest attention to each token of [first, end).
  Matrix largest() {
    const int group = view_.group(), at_once = std::max(1, block_rows / group);
    const auto tile = static_cast<std::size_t>(kernels_.keys);
    const std::size_t stride = (positions_.size() + pass_keys_.stride() + tile - 1) / tile * tile;
    float* logits = logits_.at_least(product(at_once, group) * stride);
    float* pass_logits = pass_logits_.at_least(product(at_once, group) * pass_keys_.stride());
    float* exponentials = exponentials_.at_least(stride);
    Matrix all(group, view_.prompt());
    for (int begin = piece_.begin; begin < piece_.end; begin += at_once) {
      if (view_.backend().interruption().ended()) break;
      const int end = std::min(begin + at_once, piece_.end);
      prompt_keys_.write_logits(prompt_, rows(begin, end, [&](int) { return std::ssize(positions_); }), stride, block_,
                                logits);
      pass_keys_.write_logits(pass_, rows(begin, end, [](int number) { return number + 1; }), pass_keys_.stride(),
                              block_, pass_logits);
      for (int number = begin; number < end; ++number)
        for (int member = 0; member < group; ++member) {
          const std::size_t row = product(number - begin, group) + static_cast<std::size_t>(member);
          std::copy_n(pass_logits + row * pass_keys_.stride(), number + 1, logits + row * stride + positions_.size());
          raise(logits + row * stride, exponentials, number, member, all.row(member));
        }
    }
    return all;
  }

 private:
  LayerTensors with_keys(const TensorView& keys) const {
    LayerTensors layer = view_.tensors();
    layer.q = view_.place().reconstruction.q;
    layer.k = keys;
    return layer;
  }
  PackedKeys packed(const LayerTensors& layer, std::span<const std::int32_t> keys) const {
    return {kernels_, layer, piece_.kv_head, {.count = static_cast<int>(keys.size()), .resident = keys}};
  }
  std::vector<BlockRow> rows(int begin, int end, auto keys_seen) const {
    std::vector<BlockRow> all;
    for (int number = begin; number < end; ++number)
      for (int member = 0; member < view_.group(); ++member)
        all.push_back({piece_.kv_head * view_.group() + member,
                       {.stored = begin_ + number, .end = static_cast<int>(keys_seen(number))}});
    return all;
  }

  void raise(const float* logits, float* exponentials, int number, int member, std::span<double> largest) const {
    const auto of_prompt = static_cast<int>(positions_.size());
    const int lowest = view_.tensors().first_visible(view_.prompt() + number);
    // Of positions in their order those behind the window come first.
    const auto unseen = static_cast<int>(std::ranges::lower_bound(positions_, lowest) - positions_.begin());
    if (unseen == of_prompt) return;
    LogitRow row{logits, exponentials, unseen, of_prompt + number + 1};
    if (!compute_rows(kernels_, std::span(&row, 1)))
      throw Error{Refusal::input, "attention", "logits", "finite numbers", "NaN or Inf"};
    row.first = std::max(row.first, read_.sinks);
    row.end = of_prompt;
    if (row.first < row.end)
      raise_to_softmax(kernels_, row, view_.tensors().sink(piece_.kv_head * view_.group() + member),
                       largest.data() + positions_[static_cast<std::size_t>(row.first)]);
  }

  const LayerView& view_;
  const Piece piece_;
  const PassTokens read_;
  const int begin_;  // of the pass, among the tokens of all
  const TileKernels& kernels_;
  const LayerTensors prompt_, pass_;           // with the queries of the passes
  const std::vector<std::int32_t> positions_;  // of the prompt keys, ascending
  const PackedKeys prompt_keys_, pass_keys_;
  SoftmaxBlock block_{kernels_};
  AlignedBuffer<float> logits_, pass_logits_, exponentials_;
};

}  // namespace

const Matrix& largest_attention_of_passes(const LayerView& view, std::span<const PassTokens> reads) {
  LayerView::Arguments arguments;
  for (const PassTokens& read : reads)
    for (const int number : {read.sinks, read.first, read.end}) arguments.push_back(number);
  return view.remember("largest_attention_of_passes", std::move(arguments), [&] {
    const std::vector<Piece> pieces = pieces_of(view.place().reconstruction.passes, view.kv_heads());
    Matrix largest(view.query_heads(), view.prompt());
    std::mutex raising;
    view.on_threads(pieces.size(), [&](std::size_t number) {
      const Piece& piece = pieces[number];
      const Matrix of_piece = KeysOfPiece(view, piece, reads[piece.pass]).largest();
      const std::lock_guard lock(raising);  // the order does not matter
      for (int member = 0; member < view.group(); ++member) {
        const std::span<double> row = largest.row(piece.kv_head * view.group() + member);
        std::ranges::transform(row, of_piece.row(member), row.begin(),
                               [](double a, double b) { return std::max(a, b); });
      }
    });
    return largest;
  });
}

}  // namespace kvreplay
