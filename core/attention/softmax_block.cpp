#include "attention/softmax_block.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>

#include "attention/rope.h"
#include "error.h"

namespace kvreplay {

namespace {

/// What the query at `position` sees: participants [first, end), its own key among them or not.
void find_visible(const Participants& participants, int position, int window, QueryPlace& place) {
  const int lowest = window > 0 ? std::max(0, position - window + 1) : 0;
  if (participants.resident.empty()) {
    place.first = std::min(lowest, participants.count);
    place.end = std::min(position + 1, participants.count);
    if (position < participants.count) place.own = position;
    return;
  }
  int seen = 0;
  for (int key = 0; key < participants.count; ++key) {
    const int stands = participants.position(key);
    if (stands < lowest || stands > position) continue;
    if (seen == 0) place.first = key;
    place.end = key + 1;
    if (stands == position) place.own = key;
    ++seen;
  }
  if (place.end - place.first != seen) {
    throw Error{Refusal::usage, "resident", "order",
                "keys that query " + std::to_string(position) + " sees side by side", "others among them"};
  }
}

}  // namespace

std::vector<QueryPlace> query_places(const LayerTensors& layer, std::span<const std::int32_t> queries,
                                     const Participants& participants) {
  const std::span<const std::int32_t> stored = layer.query_positions;
  std::vector<QueryPlace> places;
  places.reserve(queries.size());
  for (const std::int32_t position : queries) {
    const auto found = std::lower_bound(stored.begin(), stored.end(), position);
    const bool is_stored =
        stored.empty() ? position >= 0 && position < layer.q.tokens : found != stored.end() && *found == position;
    if (!is_stored) {
      throw Error{Refusal::input, "q", "stored queries", "position " + std::to_string(position), "none"};
    }
    QueryPlace place;
    place.stored = stored.empty() ? position : static_cast<int>(found - stored.begin());
    find_visible(participants, position, layer.sliding_window, place);
    if (participants.positions == Positions::cache) {
      if (place.own < 0) {
        throw Error{Refusal::usage, "resident", "cache positions", "query " + std::to_string(position) + " is resident",
                    "it is not"};
      }
      place.moved = participants.moved(place.own);
    }
    places.push_back(place);
  }
  return places;
}

void SoftmaxBlock::prepare(const LayerTensors& layer, std::span<const BlockRow> rows, bool with_logits) {
  const int dim = layer.q.dim;
  const auto size = [](int a, int b, int c = 1) {
    return static_cast<std::size_t>(a) * static_cast<std::size_t>(b) * static_cast<std::size_t>(c);
  };
  const int panels = (static_cast<int>(rows.size()) + kernels_.rows - 1) / kernels_.rows;
  const int padded_rows = panels * kernels_.rows;
  const auto row_at = [&](int row) -> const BlockRow& {
    return rows[static_cast<std::size_t>(std::min(row, static_cast<int>(rows.size()) - 1))];
  };

  std::int32_t* first = first_.at_least(size(padded_rows, 1));
  std::int32_t* end = end_.at_least(size(padded_rows, 1));
  PanelRange* ranges = ranges_.at_least(size(panels, 1));
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

  // log2(e) is folded into what the query is multiplied with; a capped logit takes it after its tanh.
  const float log2_e = std::numbers::log2e_v<float>;
  const float cap = layer.logit_softcap;
  const float factor = cap > 0.0F ? layer.softmax_scale / cap : layer.softmax_scale * log2_e;
  float* queries = queries_.at_least(size(padded_rows, dim));
  float* staging = staging_.at_least(size(kernels_.rows, dim));
  for (int panel = 0; panel < panels; ++panel) {
    for (int r = 0; r < kernels_.rows; ++r) {
      const BlockRow& row = row_at(panel * kernels_.rows + r);
      float* vector = staging + size(r, dim);
      kernels_.widen(layer.q.row(row.head, row.place.stored), layer.q.dtype, dim, vector);
      rotate(layer.rope, row.place.moved, {vector, size(dim, 1)});
      for (int c = 0; c < dim; ++c) vector[c] *= factor;
    }
    kernels_.pack(staging, kernels_.rows, dim, kernels_.rows, queries + size(panel, dim, kernels_.rows));
  }

  block_.panels = panels;
  block_.dim = dim;
  block_.first_tile = lowest_first / kernels_.keys;
  end_tile_ = std::max(block_.first_tile, (highest_end + kernels_.keys - 1) / kernels_.keys);
  block_.queries = queries;
  block_.first = first;
  block_.end = end;
  block_.ranges = ranges;
  block_.cap = cap > 0.0F ? cap * log2_e : 0.0F;
  block_.reference = references_.at_least(size(padded_rows, 1));
  block_.exponent = exponent_.at_least(size(padded_rows, 1));
  block_.settled = settled_.at_least(size(panels, 1));
  block_.lane_sums = lane_sums_.at_least(size(padded_rows, kernels_.keys));
  block_.row_sums = row_sums_.at_least(size(padded_rows, 1));
  const std::size_t cells = size(end_tile_ - block_.first_tile, padded_rows, kernels_.keys);
  block_.exponentials = exponentials_.at_least(cells);
  block_.logits = with_logits ? logits_.at_least(cells) : nullptr;
  std::fill_n(block_.reference, padded_rows, -HUGE_VALF);
  std::fill_n(block_.exponent, padded_rows, 0);
  std::fill_n(block_.settled, panels, false);
}

void SoftmaxBlock::begin_sums() {
  const int rows = block_.panels * kernels_.rows;
  std::fill_n(block_.lane_sums, static_cast<std::ptrdiff_t>(rows) * kernels_.keys, 0.0F);
  std::fill_n(block_.row_sums, rows, 0.0);
}

float& SoftmaxBlock::exponential(int row, int key) {
  const std::ptrdiff_t piece =
      static_cast<std::ptrdiff_t>(key / kernels_.keys - block_.first_tile) * block_.panels + row / kernels_.rows;
  return block_.exponentials[(piece * kernels_.rows + row % kernels_.rows) * kernels_.keys + key % kernels_.keys];
}

void pack_keys(const TileKernels& kernels, const LayerTensors& layer, int kv_head, const Participants& participants,
               int tile, AlignedBuffer<float>& staging, float* out) {
  const int dim = layer.k.dim;
  const auto width = static_cast<std::size_t>(dim);
  float* vectors = staging.at_least(static_cast<std::size_t>(kernels.keys) * width);
  const int begin = tile * kernels.keys;
  const int end = std::min(begin + kernels.keys, participants.count);
  for (int key = begin; key < end; ++key) {
    float* vector = vectors + static_cast<std::size_t>(key - begin) * width;
    kernels.widen(layer.k.row(kv_head, participants.position(key)), layer.k.dtype, dim, vector);
    rotate(layer.rope, participants.moved(key), {vector, width});
  }
  kernels.pack(vectors, end - begin, dim, kernels.keys, out);
}

}  // namespace kvreplay
