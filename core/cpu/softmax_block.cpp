#include "cpu/softmax_block.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "attention/rope.h"
#include "attention/row_sums.h"

namespace kvreplay {

namespace {

// No level has more rows in a panel or keys in a tile.
constexpr int most_vectors = 32;
constexpr std::size_t cache_line = 64;

/// Into the second-level cache: the first awaits fewer lines at a time than a tile of vectors has.
void fetch(const std::byte* vector, std::size_t bytes) {
  for (std::size_t byte = 0; byte < bytes; byte += cache_line) __builtin_prefetch(vector + byte, 0, 2);
}

}  // namespace

const TileForm& form_of(const TileKernels& kernels, const LayerTensors& layer, const SoftmaxKeys& softmax_keys) {
  const bool stored_so = layer.q.dtype == DType::bfloat16 && layer.k.dtype == DType::bfloat16;
  const bool moves = softmax_keys.positions == Positions::cache;
  return kernels.bfloat16 != nullptr && stored_so && !moves ? *kernels.bfloat16 : kernels.float32;
}

void SoftmaxBlock::prepare(const LayerTensors& layer, const TileForm& form, std::span<const BlockRow> rows,
                           bool with_logits) {
  const int row_count = static_cast<int>(rows.size());
  const int panels = (row_count + kernels_.rows - 1) / kernels_.rows;
  const int padded_rows = panels * kernels_.rows;
  const auto row_at = [&](int row) -> const BlockRow& {
    return rows[static_cast<std::size_t>(std::min(row, row_count - 1))];
  };

  std::int32_t* first = first_.at_least(product(padded_rows, 1));
  std::int32_t* end = end_.at_least(product(padded_rows, 1));
  PanelRange* ranges = ranges_.at_least(product(panels, 1));
  int lowest_first = std::numeric_limits<int>::max();
  int highest_end = 0;
  for (int panel = 0; panel < panels; ++panel) {
    PanelRange range{std::numeric_limits<int>::max(), 0, std::numeric_limits<int>::max(), 0};
    for (int row = panel * kernels_.rows; row < (panel + 1) * kernels_.rows; ++row) {
      const QueryPlace& place = row_at(row).place;
      first[row] = place.first;
      end[row] = place.end;
      range.lowest_first = std::min(range.lowest_first, place.first);
      range.highest_first = std::max(range.highest_first, place.first);
      range.lowest_end = std::min(range.lowest_end, place.end);
      range.highest_end = std::max(range.highest_end, place.end);
    }
    ranges[panel] = range;
    lowest_first = std::min(lowest_first, range.lowest_first);
    highest_end = std::max(highest_end, range.highest_end);
  }

  block_.rows = row_count;
  block_.panels = panels;
  block_.cells = form.cells(layer.q.dim);
  block_.first_tile = lowest_first / kernels_.keys;
  end_tile_ = std::max(block_.first_tile, (highest_end + kernels_.keys - 1) / kernels_.keys);
  block_.first = first;
  block_.end = end;
  block_.ranges = ranges;
  // A capped logit takes its log2(e) after its tanh.
  const float log2_e = std::numbers::log2e_v<float>;
  const float cap = layer.logit_softcap;
  block_.scale = cap > 0.0F ? layer.softmax_scale / cap : layer.softmax_scale * log2_e;
  block_.cap = cap > 0.0F ? cap * log2_e : 0.0F;
  form_ = &form;
  sinks_.clear();
  if (!layer.sinks.empty())
    for (const BlockRow& row : rows) sinks_.push_back(layer.sink(row.head) * std::numbers::log2e);
  pack_queries(layer, rows);

  block_.reference = references_.at_least(product(padded_rows, 1));
  block_.settled = settled_.at_least(product(panels, 1));
  block_.lane_sums = lane_sums_.at_least(product(padded_rows, kernels_.keys));
  block_.row_sums = row_sums_.at_least(product(padded_rows, 1));
  const std::size_t cells =
      product(end_tile_ - block_.first_tile, padded_rows) * static_cast<std::size_t>(kernels_.keys);
  block_.exponentials = exponentials_.at_least(cells);
  block_.logits = with_logits ? logits_.at_least(cells) : nullptr;
  std::fill_n(block_.reference, padded_rows, -HUGE_VALF);
  std::fill_n(block_.settled, panels, false);
}

void SoftmaxBlock::pack_queries(const LayerTensors& layer, std::span<const BlockRow> rows) {
  const int dim = layer.q.dim;
  const std::size_t panel_cells = product(block_.cells, kernels_.rows);
  float* queries = queries_.at_least(static_cast<std::size_t>(block_.panels) * panel_cells);
  float* staging = staging_.at_least(product(kernels_.rows, dim));
  block_.queries = queries;
  const bool moves = std::ranges::any_of(rows, [](const BlockRow& row) { return row.place.moved != 0; });
  for (int panel = 0; panel < block_.panels; ++panel) {
    std::array<const std::byte*, most_vectors> vectors;
    for (int r = 0; r < kernels_.rows; ++r) {
      const BlockRow& row = rows[static_cast<std::size_t>(std::min(panel * kernels_.rows + r, block_.rows - 1))];
      const std::byte*& vector = vectors[static_cast<std::size_t>(r)];
      vector = layer.q.row(row.head, row.place.stored);
      if (!moves) continue;
      const std::span<float> moved(staging + product(r, dim), static_cast<std::size_t>(dim));
      kernels_.widen(vector, layer.q.dtype, dim, moved.data());
      rotate(layer.rope, row.place.rotation, row.place.moved, moved);
      vector = reinterpret_cast<const std::byte*>(moved.data());
    }
    float* packed = queries + static_cast<std::size_t>(panel) * panel_cells;
    form_->pack(vectors.data(), moves ? DType::float32 : layer.q.dtype, dim, kernels_.rows, packed);
    if (form_->numbers_a_cell == 1)
      for (std::size_t i = 0; i < panel_cells; ++i) packed[i] *= block_.scale;
  }
}

void SoftmaxBlock::begin_sums() {
  const int rows = block_.panels * kernels_.rows;
  std::fill_n(block_.lane_sums, static_cast<std::ptrdiff_t>(rows) * kernels_.keys, 0.0F);
  std::fill_n(block_.row_sums, rows, 0.0);
}

bool SoftmaxBlock::all_sums_finite() const {
  return std::all_of(block_.row_sums, block_.row_sums + block_.rows, [](double sum) { return std::isfinite(sum); });
}

double SoftmaxBlock::sink_weight(int row) const {
  if (sinks_.empty()) return 0.0;
  return kvreplay::sink_weight(sinks_[static_cast<std::size_t>(row)], static_cast<double>(block_.reference[row]));
}

float& SoftmaxBlock::exponential(int row, int key) {
  const std::ptrdiff_t piece =
      static_cast<std::ptrdiff_t>(key / kernels_.keys - block_.first_tile) * block_.panels + row / kernels_.rows;
  return block_.exponentials[(piece * kernels_.rows + row % kernels_.rows) * kernels_.keys + key % kernels_.keys];
}

void SoftmaxBlock::count_above_one(const float* factors) {
  const int panel_cells = kernels_.rows * kernels_.keys;
  float* piece = block_.exponentials;
  for (int tile = first_tile(); tile < end_tile_; ++tile)
    for (int panel = 0; panel < block_.panels; ++panel, piece += panel_cells) {
      if (!block_.ranges[panel].sees_some(tile * kernels_.keys, (tile + 1) * kernels_.keys)) continue;
      const int rows = std::min(kernels_.rows, block_.rows - panel * kernels_.rows);
      for (int row = 0; row < rows; ++row) {
        const float factor = factors[panel * kernels_.rows + row];
        float* p = piece + row * kernels_.keys;
        for (int key = 0; key < kernels_.keys; ++key) p[key] = p[key] * factor > 1.0F ? 1.0F : 0.0F;
      }
    }
}

bool compute_rows(const TileKernels& kernels, std::span<LogitRow> rows) {
  const auto all_finite = [&] {
    return std::ranges::all_of(rows,
                               [&](LogitRow& row) { return kernels.row_exponentials(row) && std::isfinite(row.sum); });
  };
  if (all_finite()) return true;
  for (LogitRow& row : rows) kernels.raise_row_reference(row);
  return all_finite();
}

namespace {

/// Of the exponentials of a row and of the sink logit.
double sum_with_sink(const LogitRow& row, double sink) {
  return row.sum + sink_weight(sink * std::numbers::log2e, static_cast<double>(row.reference));
}

}  // namespace

void add_softmax(const TileKernels& kernels, const LogitRow& row, double weight, double sink, double* sums) {
  const double sum = sum_with_sink(row, sink);
  if (sum > 0.0) kernels.add_row_shares(row, static_cast<float>(weight / sum), sums);
}

void raise_to_softmax(const TileKernels& kernels, const LogitRow& row, double sink, double* largest) {
  const double sum = sum_with_sink(row, sink);
  if (sum > 0.0) kernels.raise_to_row_shares(row, static_cast<float>(1.0 / sum), largest);
}

void pack_keys(const TileKernels& kernels, const TileForm& form, const LayerTensors& layer, int kv_head,
               const SoftmaxKeys& softmax_keys, int tile, AlignedBuffer<float>& staging, float* out) {
  const int dim = layer.k.dim;
  const bool moves = softmax_keys.positions == Positions::cache;
  float* room = moves ? staging.at_least(product(kernels.keys, dim)) : nullptr;
  std::array<const std::byte*, most_vectors> vectors;
  for (int i = 0; i < kernels.keys; ++i) {
    const int key = std::min(tile * kernels.keys + i, softmax_keys.count - 1);
    const std::byte*& vector = vectors[static_cast<std::size_t>(i)];
    vector = layer.k.row(kv_head, softmax_keys.position(key));
    const int later = std::min(key + kernels.keys, softmax_keys.count - 1);
    fetch(layer.k.row(kv_head, softmax_keys.position(later)), layer.k.row_bytes());
    if (!moves) continue;
    const std::span<float> moved(room + product(i, dim), static_cast<std::size_t>(dim));
    kernels.widen(vector, layer.k.dtype, dim, moved.data());
    rotate(layer.rope, softmax_keys.rotation, softmax_keys.moved(key), moved);
    vector = reinterpret_cast<const std::byte*>(moved.data());
  }
  form.pack(vectors.data(), moves ? DType::float32 : layer.k.dtype, dim, kernels.keys, out);
}

PackedKeys::PackedKeys(const TileKernels& kernels, const LayerTensors& layer, int kv_head,
                       const SoftmaxKeys& softmax_keys)
    : form_(form_of(kernels, layer, softmax_keys)), tile_cells_(product(form_.cells(layer.k.dim), kernels.keys)) {
  const int tiles = (softmax_keys.count + kernels.keys - 1) / kernels.keys;
  stride_ = product(tiles, kernels.keys);
  float* packed = packed_.at_least(static_cast<std::size_t>(tiles) * tile_cells_);
  AlignedBuffer<float> staging;
  for (int tile = 0; tile < tiles; ++tile)
    pack_keys(kernels, form_, layer, kv_head, softmax_keys, tile, staging,
              packed + static_cast<std::size_t>(tile) * tile_cells_);
}

void PackedKeys::write_logits(const LayerTensors& layer, std::span<const BlockRow> rows, std::size_t stride,
                              SoftmaxBlock& block, float* out) const {
  block.prepare(layer, form_, rows, false);
  block.write_logits([&](int tile) { return packed_.data() + static_cast<std::size_t>(tile) * tile_cells_; }, stride,
                     out);
}

}  // namespace kvreplay
