#include "observables/query_logits.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cpu/softmax_block.h"
#include "error.h"

namespace kvreplay {
namespace {

// Logits that are computed at once: half of a second-level cache, but no more rows than hide the reading of keys.
constexpr std::size_t block_bytes = std::size_t{1} << 19;
constexpr std::size_t block_rows = 48;

SoftmaxKeys keys_of(const LayerView& view, int kv_head) {
  SoftmaxKeys keys{.count = view.tokens(), .positions = view.residents().place};
  if (!view.is_whole()) keys.resident = view.positions(kv_head).numbers();
  return keys;
}

}  // namespace

void HeadLogits::add_softmax(double weight, std::span<double> sums, double sink) const {
  const TileKernels& kernels = tile_kernels();
  LogitRow row{.logits = logits, .exponentials = exponentials, .first = first, .end = end};
  if (!compute_rows(kernels, std::span(&row, 1)))
    throw Error{Refusal::input, "attention", "logits", "finite numbers", "NaN or Inf"};
  kvreplay::add_softmax(kernels, row, weight, sink, sums.data() + first);
}

QueryLogits::QueryLogits(const LayerView& view, int kv_head)
    : view_(view),
      kv_head_(kv_head),
      kernels_(tile_kernels()),
      keys_(keys_of(view, kv_head)),
      form_(form_of(kernels_, view.tensors(), keys_)) {
  const int tiles = (keys_.count + kernels_.keys - 1) / kernels_.keys;
  const std::size_t cells = product(form_.cells(view.tensors().k.dim), kernels_.keys);
  float* packed = packed_.at_least(static_cast<std::size_t>(tiles) * cells);
  AlignedBuffer<float> staging;
  for (int tile = 0; tile < tiles; ++tile)
    pack_keys(kernels_, form_, view.tensors(), kv_head, keys_, tile, staging,
              packed + static_cast<std::size_t>(tile) * cells);
}

void QueryLogits::of_each(std::span<const std::int32_t> queries, const Visit& visit) const {
  if (queries.empty() || keys_.count == 0) return;
  const LayerTensors& tensors = view_.tensors();
  const auto group = static_cast<std::size_t>(tensors.group());
  const std::vector<QueryPlace> places = query_places(tensors, queries, keys_);
  const auto tile_keys = static_cast<std::size_t>(kernels_.keys);
  const std::size_t cells = product(form_.cells(tensors.k.dim), kernels_.keys);
  const std::size_t stride = (static_cast<std::size_t>(keys_.count) + tile_keys - 1) / tile_keys * tile_keys;
  const std::size_t rows = std::clamp(block_bytes / (stride * sizeof(float)), group, std::max(group, block_rows));
  const std::size_t at_once = rows / group;  // queries
  SoftmaxBlock block(kernels_);
  AlignedBuffer<float> logit_buffer, exponential_buffer;
  float* logits = logit_buffer.at_least(at_once * group * stride);
  float* exponentials = exponential_buffer.at_least(stride);
  std::vector<BlockRow> block_of_rows;
  std::vector<HeadLogits> heads(group);
  for (std::size_t begin = 0; begin < queries.size(); begin += at_once) {
    if (view_.backend().interruption().ended()) return;  // LayerView::on_threads() throws
    const std::size_t end = std::min(begin + at_once, queries.size());
    block_of_rows.clear();
    for (std::size_t i = begin; i < end; ++i)
      for (std::size_t member = 0; member < group; ++member) {
        block_of_rows.push_back({kv_head_ * tensors.group() + static_cast<int>(member), places[i]});
        block_of_rows.back().place.first = 0;
      }
    block.prepare(tensors, form_, block_of_rows, false);
    block.write_logits([&](int tile) { return packed_.data() + static_cast<std::size_t>(tile) * cells; }, stride,
                       logits);
    for (std::size_t i = begin; i < end; ++i) {
      for (std::size_t member = 0; member < group; ++member)
        heads[member] = {.head = kv_head_ * tensors.group() + static_cast<int>(member),
                         .first = places[i].first,
                         .end = places[i].end,
                         .logits = logits + ((i - begin) * group + member) * stride,
                         .exponentials = exponentials};
      visit(queries[i], heads);
    }
  }
}

}  // namespace kvreplay
