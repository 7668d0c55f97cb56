// H2O's greedy algorithm (Zhang et al. 2023, arXiv:2306.14048, algorithm 1): one step a token, over what is held alone;
// and TOVA's (Oren et al. 2024, arXiv:2401.06104), where scores are forgotten before each step.
//
// What is held changes by a token or two a step, so the exponentials of several queries are computed at once, over all
// that any of them sees. Then step by step: those of tokens that have gone meanwhile are struck out, a query's others
// are summed and shared out, and the lowest score goes.
#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <utility>

#include "cpu/cpu_backend.h"
#include "error.h"
#include "positions.h"

namespace kvreplay {
namespace {

// Panels of rows whose exponentials are computed at once: so often keys are read, and so long the rows of those that
// went are computed in vain.
constexpr int panels_at_once = 2;
// A sum of exponentials from which so much has been struck out that those that remain may have lost digits: the largest
// was at least 1/2.
constexpr double least_sum = 0x1p-20;

/// The query heads [first, end) whose mean attention decides for one row of held tokens.
struct HeadRange {
  int first = 0;
  int end = 0;
};

/// What one row holds. The keys that the next query sees lie in slots of packed tiles, in no order. A token that goes
/// leaves its slot behind until the slots are closed up. One that the sliding window has passed by keeps nothing but
/// its score.
class HeldTokens {
 public:
  HeldTokens(const TileKernels& kernels, const TileForm& form, const OnlineKernels& online, const LayerTensors& layer,
             HeadRange kv_heads, int most)
      : kernels_(kernels),
        form_(form),
        online_(online),
        layer_(layer),
        kv_heads_(kv_heads),
        cells_(form.cells(layer.k.dim)) {
    const auto keys = static_cast<std::size_t>(kernels.keys);
    tiles_ = (static_cast<std::size_t>(most) + keys - 1) / keys;
    tile_cells_ = product(cells_, kernels.keys);
    const std::size_t cells = static_cast<std::size_t>(kv_heads.end - kv_heads.first) * tiles_ * tile_cells_;
    std::fill_n(keys_.at_least(cells), cells, 0.0F);
    std::fill_n(positions_.at_least(tiles_ * keys), tiles_ * keys, nobody);
    std::fill_n(scores_.at_least(tiles_ * keys), tiles_ * keys, 0.0);
  }

  int count() const { return slots_ - static_cast<int>(gone_.size()) + static_cast<int>(passed_.size()); }
  int slots() const { return slots_; }
  /// Slots left behind.
  std::span<const int> gone() const { return gone_; }
  const float* keys(int kv_head, int tile) const {
    return keys_.data() + tile_of(kv_head, static_cast<std::size_t>(tile));
  }
  double* scores() { return scores_.data(); }

  void add(int position, double score) {
    const int slot = slots_++;
    // No panel is narrower than the kernels': the same vector fills one.
    float* panel = panel_.at_least(product(cells_, kernels_.rows));
    for (int kv_head = kv_heads_.first; kv_head < kv_heads_.end; ++kv_head) {
      const std::vector<const std::byte*> vectors(static_cast<std::size_t>(kernels_.rows),
                                                  layer_.k.row(kv_head, position));
      form_.pack(vectors.data(), layer_.k.dtype, layer_.k.dim, kernels_.rows, panel);
      move_cells(panel, kernels_.rows, column_of(kv_head, slot));
    }
    positions_.data()[slot] = position;
    scores_.data()[slot] = score;
  }
  void add_passed(int position, double score) { passed_.push_back({position, score}); }
  void forget_scores() {
    std::fill_n(scores_.data(), slots_, 0.0);
    for (Token& token : passed_) token.score = 0.0;
  }

  /// The window has passed by `position`.
  void pass(int position) {
    const std::int64_t* found = std::find(positions_.data(), positions_.data() + slots_, position);
    if (found == positions_.data() + slots_) return;
    const auto slot = static_cast<int>(found - positions_.data());
    add_passed(position, scores_.data()[slot]);
    leave(slot);
  }

  /// Evicts the token of the lowest score in [begin, end), of equal scores the last one, and returns its position.
  int evict_between(int begin, int end) {
    const int slot = online_.lowest(scores_.data(), positions_.data(), slots_, begin, end);
    Token lowest;
    if (slot >= 0) lowest = {static_cast<int>(positions_.data()[slot]), scores_.data()[slot]};
    std::size_t number = passed_.size();
    for (std::size_t i = 0; i < passed_.size(); ++i) {
      if (passed_[i].position < begin || passed_[i].position >= end || !lowest.gives_way_to(passed_[i])) continue;
      lowest = passed_[i];
      number = i;
    }
    if (number < passed_.size()) {
      passed_[number] = passed_.back();
      passed_.pop_back();
    } else {
      leave(slot);
    }
    return lowest.position;
  }

  /// Forgets the slots from `end` on, and moves the last ones to those left behind.
  void close_up(int end) {
    for (; slots_ > end; --slots_) positions_.data()[slots_ - 1] = nobody;
    std::ranges::sort(gone_, std::greater<>());
    for (const int slot : gone_) {
      const int last = --slots_;
      for (int kv_head = kv_heads_.first; kv_head < kv_heads_.end; ++kv_head)
        move_cells(column_of(kv_head, last), kernels_.keys, column_of(kv_head, slot));
      scores_.data()[slot] = scores_.data()[last];
      positions_.data()[slot] = positions_.data()[last];
      positions_.data()[last] = nobody;
    }
    gone_.clear();
  }

 private:
  static constexpr std::int64_t nobody = std::numeric_limits<std::int64_t>::max();

  struct Token {
    int position = -1;  // none
    double score = 0.0;

    bool gives_way_to(const Token& other) const {
      return position < 0 || other.score < score || (other.score == score && other.position > position);
    }
  };

  std::size_t tile_of(int kv_head, std::size_t tile) const {
    return (static_cast<std::size_t>(kv_head - kv_heads_.first) * tiles_ + tile) * tile_cells_;
  }
  float* column_of(int kv_head, int slot) {
    return keys_.data() + tile_of(kv_head, static_cast<std::size_t>(slot / kernels_.keys)) + slot % kernels_.keys;
  }
  /// Into a slot. A cell is moved bit by bit: as a number it need not be one.
  void move_cells(const float* from, std::ptrdiff_t apart, float* slot) const {
    for (std::ptrdiff_t c = 0; c < cells_; ++c) std::memcpy(slot + c * kernels_.keys, from + c * apart, sizeof(float));
  }
  void leave(int slot) {
    positions_.data()[slot] = nobody;
    gone_.push_back(slot);
  }

  const TileKernels& kernels_;
  const TileForm& form_;
  const OnlineKernels& online_;
  const LayerTensors& layer_;
  HeadRange kv_heads_;
  int cells_;  // of a key
  std::size_t tiles_ = 0;
  std::size_t tile_cells_ = 0;
  AlignedBuffer<float> keys_;   // [KV heads, tiles, cells, keys]
  AlignedBuffer<float> panel_;  // [cells, rows]
  int slots_ = 0;
  AlignedBuffer<std::int64_t> positions_;  // [tiles, keys]
  AlignedBuffer<double> scores_;           // [tiles, keys]
  std::vector<int> gone_;
  std::vector<Token> passed_;
};

/// The exponentials of the steps of one row of held tokens, for each KV head that its query heads read.
class Steps {
 public:
  Steps(const TileKernels& kernels, const TileForm& form, const OnlineKernels& online, const LayerTensors& layer,
        HeadRange heads, bool accumulate)
      : kernels_(kernels), form_(form), online_(online), layer_(layer), accumulate_(accumulate) {
    const int group = layer.group();
    for (int first = heads.first; first < heads.end; first = (first / group + 1) * group) {
      ranges_.push_back({first, std::min((first / group + 1) * group, heads.end)});
      blocks_.emplace_back(kernels);
    }
  }

  int at_once() const {
    return std::max(1, panels_at_once * kernels_.rows / (ranges_.front().end - ranges_.front().first));
  }

  /// The queries at `places`, the first over the slots [0, first_seen), each next one over one more. False if a logit
  /// is not a finite number.
  bool compute(const HeldTokens& tokens, std::span<const QueryPlace> places, int first_seen) {
    first_seen_ = first_seen;
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      rows_.clear();
      int end = first_seen;
      for (QueryPlace place : places) {
        place.first = 0;
        place.end = end++;
        for (int head = ranges_[i].first; head < ranges_[i].end; ++head) rows_.push_back({head, place});
      }
      blocks_[i].prepare(layer_, form_, rows_, false);
      const int kv_head = ranges_[i].first / layer_.group();
      if (!blocks_[i].compute([&](int tile) { return tokens.keys(kv_head, tile); })) return false;
    }
    return true;
  }

  /// Adds the attention of query `step` over slots that have not been left behind to their scores, or puts it in their
  /// place. False: too much of what it saw has been; nothing is added.
  bool share_out(int step, HeldTokens& tokens) {
    shared_.clear();
    const int keys = kernels_.keys;
    const int tiles = (first_seen_ + step + keys - 1) / keys;
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const int heads = ranges_[i].end - ranges_[i].first;
      for (int row = step * heads; row < (step + 1) * heads; ++row) {
        for (const int slot : tokens.gone()) blocks_[i].exponential(row, slot) = 0.0F;
        SlotRow& one = shared_.emplace_back();
        one.exponentials = &blocks_[i].exponential(row, 0);
        one.stride = static_cast<std::ptrdiff_t>(blocks_[i].tiles().panels) * kernels_.rows * keys;
        const double sum = online_.sum(one, tiles, keys);
        if (!tokens.gone().empty() && !(sum >= least_sum)) return false;
        one.sum = static_cast<float>(sum + blocks_[i].sink_weight(row));
      }
    }
    if (!accumulate_) tokens.forget_scores();
    online_.add_shares(shared_.data(), static_cast<int>(shared_.size()), tiles, keys, tokens.scores());
    return true;
  }

 private:
  const TileKernels& kernels_;
  const TileForm& form_;
  const OnlineKernels& online_;
  const LayerTensors& layer_;
  bool accumulate_;
  std::vector<HeadRange> ranges_;  // of the query heads that read one KV head
  std::vector<SoftmaxBlock> blocks_;
  std::vector<BlockRow> rows_;
  std::vector<SlotRow> shared_;
  int first_seen_ = 0;
};

/// One of several evictions.
class EvictedLayer {
 public:
  EvictedLayer(const TileKernels& kernels, const OnlineKernels& online, const LayerTensors& layer,
               const OnlineEviction& what)
      : kernels_(kernels),
        online_(online),
        layer_(layer),
        what_(what),
        rows_(rows_of(what.heads, layer.q.heads, layer.k.heads)),
        form_(form_of(kernels, layer, {.count = what.tokens})) {
    assert(what.recent >= 0 && what.recent <= what.budget);
    evicted.assign(product(rows_, what.tokens), -1);
    const std::vector<std::int32_t> queries = position_range(what.first, std::max(what.first, what.tokens));
    places_ = query_places(layer, queries, {.count = what.tokens});
  }

  /// That have tokens to come.
  int rows() const { return what_.first < what_.tokens ? rows_ : 0; }
  int budget() const { return what_.budget; }
  /// False if a logit is not a finite number; `ended` says whether to stop.
  bool evict(int row, const auto& ended);

  std::vector<std::int32_t> evicted;  // [rows, tokens]

 private:
  void enter_resident(int row, HeldTokens& tokens, std::deque<int>& recent) const;
  static void add_recent(std::deque<int>& recent, int position, int most) {
    recent.push_back(position);
    while (static_cast<int>(recent.size()) > most) recent.pop_front();
  }
  int held() const { return static_cast<int>(what_.resident.size()) / rows_; }

  const TileKernels& kernels_;
  const OnlineKernels& online_;
  const LayerTensors& layer_;
  const OnlineEviction& what_;
  int rows_;
  const TileForm& form_;
  std::vector<QueryPlace> places_;
};

void EvictedLayer::enter_resident(int row, HeldTokens& tokens, std::deque<int>& recent) const {
  for (int i = 0; i < held(); ++i) {
    const std::size_t number = product(row, held()) + static_cast<std::size_t>(i);
    const int position = what_.resident[number];
    if (position < layer_.first_visible(what_.first)) {
      tokens.add_passed(position, what_.scores[number]);
    } else {
      tokens.add(position, what_.scores[number]);
    }
    add_recent(recent, position, what_.recent_after(what_.first));
  }
}

bool EvictedLayer::evict(int row, const auto& ended) {
  const int group = layer_.group();
  HeadRange heads{0, layer_.q.heads};
  if (what_.heads == Heads::kv) heads = {row * group, (row + 1) * group};
  if (what_.heads == Heads::query) heads = {row, row + 1};
  const HeadRange kv_heads{heads.first / group, (heads.end - 1) / group + 1};

  Steps steps(kernels_, form_, online_, layer_, heads, what_.accumulate);
  HeldTokens tokens(kernels_, form_, online_, layer_, kv_heads,
                    std::min(std::max(held(), what_.budget), what_.tokens) + steps.at_once());
  std::deque<int> recent;
  enter_resident(row, tokens, recent);
  for (int token = what_.first; token < what_.tokens && !ended();) {
    const int end = std::min(token + steps.at_once(), what_.tokens);
    const int before = tokens.slots();
    const std::span<const QueryPlace> some{places_.data() + (token - what_.first),
                                           static_cast<std::size_t>(end - token)};
    for (int next = token; next < end; ++next) tokens.add(next, 0.0);
    if (!steps.compute(tokens, some, before + 1)) return false;
    int done = 0;
    for (; token < end; ++token, ++done) {
      for (int position = layer_.first_visible(token - 1); position < layer_.first_visible(token); ++position)
        tokens.pass(position);
      if (!steps.share_out(done, tokens)) break;
      add_recent(recent, token, what_.recent_after(token));
      const int still_to_come = end - token - 1;
      const int protected_from = recent.empty() ? token + 1 : recent.front();
      while (tokens.count() - still_to_come > what_.budget_after(token))
        evicted[product(row, what_.tokens) +
                static_cast<std::size_t>(tokens.evict_between(what_.first_evictable(token), protected_from))] = token;
    }
    tokens.close_up(before + done);
  }
  return true;
}

}  // namespace

std::vector<std::int32_t> CpuBackend::online_eviction(const LayerTensors& layer, const OnlineEviction& what) {
  return std::move(online_evictions(layer, std::span(&what, 1)).front());
}

std::vector<std::vector<std::int32_t>> CpuBackend::online_evictions(const LayerTensors& layer,
                                                                    std::span<const OnlineEviction> all) {
  std::vector<EvictedLayer> layers;
  layers.reserve(all.size());
  std::vector<std::pair<EvictedLayer*, int>> rows;  // the longest first
  for (const OnlineEviction& what : all) {
    EvictedLayer& one = layers.emplace_back(kernels_, online_kernels_, layer, what);
    for (int row = 0; row < one.rows(); ++row) rows.emplace_back(&one, row);
  }
  std::ranges::sort(rows, std::greater(), [](const auto& row) { return row.first->budget(); });
  std::atomic<bool> finite{true};

  // No more threads than rows: the one that called has work then, and hears of interruptions.
#pragma omp parallel for schedule(dynamic) num_threads(std::clamp(static_cast<int>(rows.size()), 1, threads_))
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (!rows[i].first->evict(rows[i].second, [&] { return !finite || interruption().ended(); })) finite = false;
  interruption().require_all_done();
  if (!finite) throw Error{Refusal::input, "attention", "logits", "finite numbers", "NaN or Inf"};
  std::vector<std::vector<std::int32_t>> evicted;
  for (EvictedLayer& one : layers) evicted.push_back(std::move(one.evicted));
  return evicted;
}

}  // namespace kvreplay
