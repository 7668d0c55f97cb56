// H2O's greedy algorithm (Zhang et al. 2023, arXiv:2306.14048, algorithm 1): one step a token, over what is held alone.
#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstddef>
#include <deque>

#include "attention/cpu_backend.h"
#include "error.h"
#include "positions.h"

namespace kvreplay {
namespace {

/// The query heads [first, end) whose mean attention decides for one row of held tokens.
struct HeadRange {
  int first = 0;
  int end = 0;
};

/// What one row holds. The keys that the next query sees lie in slots of packed tiles, in no order: the last one moves
/// to where one goes. A token that the sliding window has passed by keeps nothing but its score.
class HeldTokens {
 public:
  HeldTokens(const TileKernels& kernels, const LayerTensors& layer, HeadRange kv_heads, int most)
      : kernels_(kernels), layer_(layer), kv_heads_(kv_heads) {
    const auto keys = static_cast<std::size_t>(kernels.keys);
    tiles_ = (static_cast<std::size_t>(most) + keys - 1) / keys;
    tile_floats_ = static_cast<std::size_t>(layer.k.dim) * keys;
    const std::size_t floats = static_cast<std::size_t>(kv_heads.end - kv_heads.first) * tiles_ * tile_floats_;
    std::fill_n(keys_.at_least(floats), floats, 0.0F);
  }

  int count() const { return seen() + static_cast<int>(passed_.size()); }
  int seen() const { return static_cast<int>(positions_.size()); }
  const float* keys(int kv_head, int tile) const {
    return keys_.data() + tile_of(kv_head, static_cast<std::size_t>(tile));
  }
  int tiles() const { return static_cast<int>(tiles_); }
  void add_scores(const double* sums, int heads) {
    for (std::size_t slot = 0; slot < positions_.size(); ++slot) scores_[slot] += sums[slot] / heads;
  }

  void add(int position, double score) {
    const std::size_t slot = positions_.size();
    const int dim = layer_.k.dim;
    float* vector = vector_.at_least(static_cast<std::size_t>(dim));
    for (int kv_head = kv_heads_.first; kv_head < kv_heads_.end; ++kv_head) {
      kernels_.widen(layer_.k.row(kv_head, position), layer_.k.dtype, dim, vector);
      float* column = column_of(kv_head, slot);
      for (int c = 0; c < dim; ++c) column[static_cast<std::ptrdiff_t>(c) * kernels_.keys] = vector[c];
    }
    positions_.push_back(position);
    scores_.push_back(score);
  }

  void add_passed(int position, double score) { passed_.push_back({position, score}); }

  /// The window has passed by `position`.
  void pass(int position) {
    const auto found = std::ranges::find(positions_, position);
    if (found == positions_.end()) return;
    const auto slot = static_cast<std::size_t>(found - positions_.begin());
    add_passed(position, scores_[slot]);
    free_slot(slot);
  }

  /// Lets the token of the lowest score before `end` go, of equal ones the last, and returns its position.
  int evict_before(int end) {
    Token lowest;
    std::size_t slot = positions_.size();
    std::size_t number = passed_.size();
    for (std::size_t i = 0; i < positions_.size(); ++i) {
      if (positions_[i] >= end || !lowest.gives_way_to({positions_[i], scores_[i]})) continue;
      lowest = {positions_[i], scores_[i]};
      slot = i;
    }
    for (std::size_t i = 0; i < passed_.size(); ++i) {
      if (passed_[i].position >= end || !lowest.gives_way_to(passed_[i])) continue;
      lowest = passed_[i];
      number = i;
    }
    if (number < passed_.size()) {
      passed_[number] = passed_.back();
      passed_.pop_back();
    } else {
      free_slot(slot);
    }
    return lowest.position;
  }

 private:
  struct Token {
    int position = -1;  // none
    double score = 0.0;

    bool gives_way_to(const Token& other) const {
      return position < 0 || other.score < score || (other.score == score && other.position > position);
    }
  };

  std::size_t tile_of(int kv_head, std::size_t tile) const {
    return (static_cast<std::size_t>(kv_head - kv_heads_.first) * tiles_ + tile) * tile_floats_;
  }
  float* column_of(int kv_head, std::size_t slot) {
    const auto keys = static_cast<std::size_t>(kernels_.keys);
    return keys_.data() + tile_of(kv_head, slot / keys) + slot % keys;
  }
  void free_slot(std::size_t slot) {
    const std::size_t last = positions_.size() - 1;
    for (int kv_head = kv_heads_.first; kv_head < kv_heads_.end; ++kv_head) {
      float* into = column_of(kv_head, slot);
      const float* from = column_of(kv_head, last);
      for (int c = 0; c < layer_.k.dim; ++c) {
        const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(c) * kernels_.keys;
        into[at] = from[at];
      }
    }
    positions_[slot] = positions_[last];
    scores_[slot] = scores_[last];
    positions_.pop_back();
    scores_.pop_back();
  }

  const TileKernels& kernels_;
  const LayerTensors& layer_;
  HeadRange kv_heads_;
  std::size_t tiles_ = 0;
  std::size_t tile_floats_ = 0;
  AlignedBuffer<float> keys_;  // [KV heads, tiles, dim, keys]
  AlignedBuffer<float> vector_;
  std::vector<int> positions_;  // [slots]
  std::vector<double> scores_;  // [slots]
  std::vector<Token> passed_;
};

}  // namespace

std::vector<std::int32_t> CpuBackend::online_eviction(const LayerTensors& layer, const OnlineEviction& what) {
  assert(what.recent >= 1 && what.recent <= what.budget);
  const int group = layer.group();
  const int rows = rows_of(what.heads, layer.q.heads, layer.k.heads);
  const int held = static_cast<int>(what.resident.size()) / rows;
  const auto at = [](int a, int b) { return static_cast<std::size_t>(a) * static_cast<std::size_t>(b); };
  std::vector<std::int32_t> evicted(at(rows, what.tokens), -1);
  const std::vector<std::int32_t> queries = position_range(what.first, what.tokens);
  const std::vector<QueryPlace> places = query_places(layer, queries, {.count = what.tokens});
  std::atomic<bool> finite{true};

  // Attention of one query over what is seen of the held tokens joins their scores. It is divided in float64, so that
  // a token attended to alone has exactly 1.
  const auto attend = [&](Scratch& mine, HeldTokens& tokens, HeadRange heads, QueryPlace place) {
    place.first = 0;
    place.end = tokens.seen();
    double* sums = mine.sums.at_least(at(tokens.tiles(), kernels_.keys));
    std::fill_n(sums, at(tokens.tiles(), kernels_.keys), 0.0);
    for (int first = heads.first; first < heads.end; first = (first / group + 1) * group) {
      const int kv_head = first / group;
      mine.rows.clear();
      for (int head = first; head < std::min((kv_head + 1) * group, heads.end); ++head)
        mine.rows.push_back({head, place});
      mine.block.prepare(layer, kernels_.float32, mine.rows, false);
      if (!mine.block.compute([&](int tile) { return tokens.keys(kv_head, tile); })) return false;
      for (int tile = 0; tile < mine.block.end_tile(); ++tile) {
        for (int row = 0; row < static_cast<int>(mine.rows.size()); ++row) {
          const float* exponentials = &mine.block.exponential(row, tile * kernels_.keys);
          const double sum = mine.block.row_sum(row);
          for (int key = 0; key < kernels_.keys; ++key)
            sums[at(tile, kernels_.keys) + static_cast<std::size_t>(key)] +=
                static_cast<double>(exponentials[key]) / sum;
        }
      }
    }
    tokens.add_scores(sums, heads.end - heads.first);
    return true;
  };

#pragma omp parallel for schedule(dynamic) num_threads(threads_)
  for (int row = 0; row < rows; ++row) {
    HeadRange heads{0, layer.q.heads};
    if (what.heads == Heads::kv) heads = {row * group, (row + 1) * group};
    if (what.heads == Heads::query) heads = {row, row + 1};
    const HeadRange kv_heads{heads.first / group, (heads.end - 1) / group + 1};
    const auto passed_by = [&](int query, int position) {
      return layer.sliding_window > 0 && position <= query - layer.sliding_window;
    };

    HeldTokens tokens(kernels_, layer, kv_heads, std::min(std::max(held, what.budget) + 1, what.tokens));
    std::deque<int> recent;
    const auto add_recent = [&](int position) {
      recent.push_back(position);
      if (static_cast<int>(recent.size()) > what.recent) recent.pop_front();
    };
    for (int i = 0; i < held; ++i) {
      const std::size_t number = at(row, held) + static_cast<std::size_t>(i);
      const int position = what.resident[number];
      if (passed_by(what.first, position)) {
        tokens.add_passed(position, what.scores[number]);
      } else {
        tokens.add(position, what.scores[number]);
      }
      add_recent(position);
    }
    for (int token = what.first; token < what.tokens && finite; ++token) {
      tokens.add(token, 0.0);
      add_recent(token);
      if (layer.sliding_window > 0) tokens.pass(token - layer.sliding_window);
      if (!attend(scratch(), tokens, heads, places[static_cast<std::size_t>(token - what.first)])) finite = false;
      while (tokens.count() > what.budget) {
        const int gone = tokens.evict_before(recent.front());
        evicted[at(row, what.tokens) + static_cast<std::size_t>(gone)] = token;
      }
    }
  }
  if (!finite) throw Error{Refusal::input, "attention", "logits", "finite numbers", "others"};
  return evicted;
}

}  // namespace kvreplay
