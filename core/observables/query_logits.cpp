#include "observables/query_logits.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cpu/aligned_buffer.h"
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
  LogitRow row{.logits = logits, .exponentials = exponentials, .first = first, .end = end};
  if (!compute_rows(*kernels, std::span(&row, 1)))
    throw Error{Refusal::input, "attention", "logits", "finite numbers", "NaN or Inf"};
  kvreplay::add_softmax(*kernels, row, weight, sink, sums.data() + first);
}

QueryLogits::QueryLogits(const LayerView& view, int kv_head)
    : view_(view),
      kv_head_(kv_head),
      kernels_(tile_kernels()),
      keys_(keys_of(view, kv_head)),
      packed_(kernels_, view.tensors(), kv_head, keys_) {}

void QueryLogits::of_each(std::span<const std::int32_t> queries, const Visit& visit) const {
  if (queries.empty() || keys_.count == 0) return;
  const LayerTensors& tensors = view_.tensors();
  const auto group = static_cast<std::size_t>(tensors.group());
  const std::vector<QueryPlace> places = query_places(tensors, queries, keys_);
  const std::size_t stride = packed_.stride();
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
    packed_.write_logits(tensors, block_of_rows, stride, block, logits);
    for (std::size_t i = begin; i < end; ++i) {
      for (std::size_t member = 0; member < group; ++member)
        heads[member] = {.head = kv_head_ * tensors.group() + static_cast<int>(member),
                         .first = places[i].first,
                         .end = places[i].end,
                         .logits = logits + ((i - begin) * group + member) * stride,
                         .exponentials = exponentials,
                         .kernels = &kernels_};
      visit(queries[i], heads);
    }
  }
}

}  // namespace kvreplay
