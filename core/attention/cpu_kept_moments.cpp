// Sums over the kept keys of many sets from one pass over the attention of the eval queries. "Everything" is a set like
// the others and goes the same way, so a set that keeps all visible keys has its bits.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <numbers>

#include "attention/cpu_backend.h"
#include "error.h"

namespace kvreplay {
namespace {

// Query rows of one block. More would pack the keys less often and hold more exponentials.
constexpr int block_rows = 96;
// Keys whose weighted values are summed in float32 before they join the float64 sums. Chunks begin at multiples of it
// whatever is kept, so that a key which a set lacks is like a weight of zero.
constexpr int chunk_keys = 256;
// A sum of exponentials below this has lost terms to underflow: it is taken again from the logits.
constexpr double smallest_safe_sum = 0x1p-80;

std::size_t product(int a, int b) { return static_cast<std::size_t>(a) * static_cast<std::size_t>(b); }

KeptSet everything(int tokens) {
  KeptSet set(Heads::layer, 1, tokens);
  for (int position = 0; position < tokens; ++position) set.keep(0, position);
  return set;
}

int kept_below(const KeptSet& set, int row, int position) {
  const std::span<const std::uint64_t> bits = set.row_bits(row);
  int count = 0;
  for (int word = 0; word < position / 64; ++word) count += std::popcount(bits[static_cast<std::size_t>(word)]);
  for (int rest = position / 64 * 64; rest < position; ++rest) count += set.keeps(row, rest) ? 1 : 0;
  return count;
}

/// Panels [begin, end) whose heads read the same row of a set.
struct PanelRun {
  int begin = 0;
  int end = 0;
  int set_row = 0;
};

/// A block of query rows of one KV head, head after head, each padded to whole panels; its exponentials and logits
/// turned key-major, so that a key's weights for all rows of a panel lie side by side.
class MomentBlock {
 public:
  MomentBlock(const TileKernels& kernels, int boundary, const SoftmaxBlock& softmax, std::span<const BlockRow> rows)
      : kernels_(kernels), tiles_(softmax.tiles()), boundary_(boundary), rows_(rows) {
    first_key_ = softmax.first_tile() * kernels.keys;
    piece_ = product(kernels.rows, kernels.keys);
    tile_floats_ = piece_ * static_cast<std::size_t>(tiles_.panels);
    nothing_.assign(tile_floats_, 0.0F);
    for (int tile = softmax.first_tile(); tile < softmax.end_tile(); ++tile) {
      kernels.turn_key_major(tiles_, tile, tiles_.exponentials);
      kernels.turn_key_major(tiles_, tile, tiles_.logits);
    }
    for (const BlockRow& row : rows) {
      end_key_ = std::max(end_key_, row.place.end);
      windowed_ = windowed_ || row.place.first > 0;
      if (row.place.own < boundary) own_keys_.push_back({row.place.own, {}, {}});
    }
    std::sort(own_keys_.begin(), own_keys_.end(), [](const OwnKey& a, const OwnKey& b) { return a.key < b.key; });
    own_keys_.erase(std::unique(own_keys_.begin(), own_keys_.end(),
                                [](const OwnKey& a, const OwnKey& b) { return a.key == b.key; }),
                    own_keys_.end());
    for (OwnKey& own : own_keys_) isolate(own);
  }

  int panels() const { return tiles_.panels; }
  /// Keys that some row may see.
  int first_key() const { return first_key_; }
  int end_key() const { return end_key_; }

  /// Keys [begin, end), all below the boundary: those that the set keeps, and own keys that it lacks. `values` are
  /// those of the chunk.
  std::span<const WeightedKey> kept_terms(const KeptSet& set, const PanelRun& run, int begin, int end,
                                          const float* values, int padded_dim) {
    terms_.clear();
    begin = std::max(begin, first_key_);
    end = std::min(end, end_key_);
    if (begin >= end) return terms_;
    if (windowed_) count_unseen(set, run);
    int rank = kept_below(set, run.set_row, begin);
    auto own = std::lower_bound(own_keys_.begin(), own_keys_.end(), begin,
                                [](const OwnKey& known, int key) { return known.key < key; });
    for (int key = begin; key < end; ++key) {
      const bool keeps = set.keeps(run.set_row, key);
      const bool is_own = own != own_keys_.end() && own->key == key;
      if (keeps || is_own) {
        terms_.push_back({keeps ? weights(key) : own->weights.data(), keeps ? logits(key) : own->logits.data(),
                          unaligned(rank, run), values + product(key % chunk_keys, padded_dim)});
      }
      if (keeps) ++rank;
      if (is_own) ++own;
    }
    return terms_;
  }

  /// Keys [begin, end), all from the boundary on.
  std::span<const WeightedKey> later_terms(int begin, int end, const float* values, int padded_dim) {
    terms_.clear();
    for (int key = std::max(begin, first_key_); key < std::min(end, end_key_); ++key) {
      terms_.push_back({weights(key), logits(key), nothing_.data(), values + product(key % chunk_keys, padded_dim)});
    }
    return terms_;
  }

  /// Logit in units of log 2, 0 where the row does not see the key.
  double logit(int row, int key) const { return static_cast<double>(logits(key)[place(row)]); }
  double reference(int row) const { return static_cast<double>(tiles_.reference[row]); }
  const BlockRow& row(int number) const { return rows_[static_cast<std::size_t>(number)]; }

 private:
  struct OwnKey {
    int key = 0;
    std::vector<float> weights, logits;  // zero but for the rows of the query that stands there
  };

  /// Of the first panel; the others follow at the distance of one piece.
  std::size_t key_offset(int key) const {
    return static_cast<std::size_t>((key - first_key_) / kernels_.keys) * tile_floats_ +
           product((key - first_key_) % kernels_.keys, kernels_.rows);
  }
  std::size_t place(int row) const {
    return static_cast<std::size_t>(row / kernels_.rows) * piece_ + static_cast<std::size_t>(row % kernels_.rows);
  }
  const float* weights(int key) const {
    return key < first_key_ ? nothing_.data() : tiles_.exponentials + key_offset(key);
  }
  const float* logits(int key) const { return tiles_.logits + key_offset(key); }

  void isolate(OwnKey& own) {
    own.weights.assign(tile_floats_, 0.0F);
    own.logits.assign(tile_floats_, 0.0F);
    for (int number = 0; number < static_cast<int>(rows_.size()); ++number) {
      if (row(number).place.own != own.key) continue;
      own.weights[place(number)] = weights(own.key)[place(number)];
      own.logits[place(number)] = logits(own.key)[place(number)];
    }
  }

  void count_unseen(const KeptSet& set, const PanelRun& run) {
    unseen_.clear();
    for (const BlockRow& some : rows_) {
      unseen_.push_back(kept_below(set, run.set_row, std::min(some.place.first, boundary_)));
    }
    gathered_.resize(static_cast<std::size_t>(chunk_keys) * tile_floats_);
  }

  /// Weights of the keys whose numbers are the ranks of a kept key among the kept keys that each row sees.
  const float* unaligned(int rank, const PanelRun& run) {
    if (!windowed_) return weights(rank);
    float* out = gathered_.data() + terms_.size() * tile_floats_;
    for (int number = run.begin * kernels_.rows; number < run.end * kernels_.rows; ++number) {
      const int seen_rank = rank - unseen_[static_cast<std::size_t>(number)];
      out[place(number)] = seen_rank < 0 ? 0.0F : weights(seen_rank)[place(number)];
    }
    return out;
  }

  const TileKernels& kernels_;
  const TileBlock& tiles_;
  int boundary_;
  std::span<const BlockRow> rows_;
  int first_key_ = 0;
  int end_key_ = 0;
  bool windowed_ = false;
  std::size_t piece_ = 0;
  std::size_t tile_floats_ = 0;
  std::vector<OwnKey> own_keys_;  // below the boundary, ascending
  std::vector<float> nothing_;
  std::vector<float> gathered_;
  std::vector<int> unseen_;  // kept keys that lie before the row's window
  std::vector<WeightedKey> terms_;
};

/// Sums of one row over K', in units of 2^scale: what Moments is made of.
struct RowSums {
  double sinks = 0, rest = 0, later = 0;
  double sinks_square = 0, rest_square = 0, later_square = 0;
  double logit_square = 0, unaligned_dot = 0;
  std::vector<double> output;  // õ, [dim]

  double total() const { return sinks + rest + later; }
};

Moments moments_of(const RowSums& set, const RowSums& full, double scale) {
  const double factor = std::exp2(scale) / full.total();
  const double square_factor = factor * factor;
  Moments moments;
  // Written as a quotient, for a set that keeps everything to have exactly 1.
  moments.mass = set.total() * std::exp2(scale) / full.total();
  moments.prompt_mass = (set.sinks + set.rest) * factor;
  moments.nosink_mass = set.rest * factor;
  moments.square = (set.sinks_square + set.rest_square + set.later_square) * square_factor;
  moments.prompt_square = (set.sinks_square + set.rest_square) * square_factor;
  moments.nosink_square = set.rest_square * square_factor;
  moments.logit_square = set.logit_square * std::numbers::ln2 * std::numbers::ln2;
  moments.unaligned_dot = set.unaligned_dot / (full.total() * full.total());
  for (std::size_t c = 0; c < set.output.size(); ++c) {
    const double error = full.output[c] - set.output[c];
    moments.output_square += set.output[c] * set.output[c];
    moments.output_dot += full.output[c] * set.output[c];
    moments.error_square += error * error;
  }
  return moments;
}

/// Sums of one panel over one set.
struct PanelSums {
  WeightSums sinks, rest;
};

RowSums row_sums(const PanelSums& kept, const WeightSums& later, int r, const double* kept_values,
                 const double* later_values, int dim) {
  RowSums sums;
  sums.sinks = kept.sinks.weight[r];
  sums.rest = kept.rest.weight[r];
  sums.later = later.weight[r];
  sums.sinks_square = kept.sinks.square[r];
  sums.rest_square = kept.rest.square[r];
  sums.later_square = later.square[r];
  sums.logit_square = kept.sinks.logit_square[r] + kept.rest.logit_square[r];
  sums.unaligned_dot = kept.sinks.unaligned_dot[r] + kept.rest.unaligned_dot[r];
  for (int c = 0; c < dim; ++c) sums.output.push_back((kept_values[c] + later_values[c]) / sums.total());
  return sums;
}

}  // namespace

KeptMoments CpuBackend::kept_moments(const LayerTensors& layer, std::span<const std::int32_t> queries, int boundary,
                                     std::span<const KeptSet* const> sets) {
  const int query_count = static_cast<int>(queries.size());
  const int group = layer.group();
  KeptMoments result;
  result.full.resize(product(layer.q.heads, query_count));
  result.kept.resize(sets.size() * result.full.size());
  if (query_count == 0) return result;

  const Participants participants{.count = queries.back() + 1};
  const std::vector<QueryPlace> places = query_places(layer, queries, participants);
  const KeptSet all = everything(boundary);
  // The sets to compute, `all` first; equal sets are computed once.
  std::vector<const KeptSet*> distinct{&all};
  std::vector<std::size_t> number_of_set;
  for (const KeptSet* set : sets) {
    assert(set->tokens() >= boundary);
    const auto same =
        std::find_if(distinct.begin(), distinct.end(), [&](const KeptSet* known) { return *known == *set; });
    number_of_set.push_back(static_cast<std::size_t>(same - distinct.begin()));
    if (same == distinct.end()) distinct.push_back(set);
  }

  const int panels_a_head = (query_count + kernels_.rows - 1) / kernels_.rows;
  const int panels_a_block = std::min(group * panels_a_head, block_rows / kernels_.rows);
  const int blocks = (group * panels_a_head + panels_a_block - 1) / panels_a_block;
  const int dim = layer.v.dim;
  const int padded_dim = (dim + kernels_.keys - 1) / kernels_.keys * kernels_.keys;
  const std::size_t panel_values = product(kernels_.rows, padded_dim);
  std::atomic<bool> finite{true};

  const auto compute_block = [&](Scratch& mine, int kv_head, int first_panel, int end_panel) {
    mine.rows.clear();
    for (int panel = first_panel; panel < end_panel; ++panel) {
      for (int r = 0; r < kernels_.rows; ++r) {
        const int query = std::min(panel % panels_a_head * kernels_.rows + r, query_count - 1);
        mine.rows.push_back({kv_head * group + panel / panels_a_head, places[static_cast<std::size_t>(query)]});
      }
    }
    mine.block.prepare(layer, mine.rows, true);
    const bool computed = mine.block.compute([&](int tile) -> const float* {
      float* keys_of_tile = mine.keys.at_least(product(layer.k.dim, kernels_.keys));
      pack_keys(kernels_, layer, kv_head, participants, tile, mine.staging, keys_of_tile);
      return keys_of_tile;
    });
    if (!computed) {
      finite = false;
      return;
    }

    MomentBlock block(kernels_, boundary, mine.block, mine.rows);
    const int panels = block.panels();
    std::vector<WeightSums> later(static_cast<std::size_t>(panels));
    std::vector<PanelSums> kept(distinct.size() * later.size());
    const std::size_t block_values = static_cast<std::size_t>(panels) * panel_values;
    double* later_values = mine.sums.at_least((distinct.size() + 1) * block_values);
    double* kept_values = later_values + block_values;
    std::fill_n(later_values, (distinct.size() + 1) * block_values, 0.0);
    float* values = mine.values.at_least(product(chunk_keys, padded_dim));

    const auto add = [&](std::span<const WeightedKey> terms, int panel, WeightSums& sums, double* weighted_values) {
      const int count = static_cast<int>(terms.size());
      kernels_.add_weights(terms.data(), count, panel, sums);
      kernels_.add_weighted_values(terms.data(), count, panel, padded_dim,
                                   weighted_values + static_cast<std::size_t>(panel) * panel_values);
    };
    const auto runs_of = [&](const KeptSet& set) {
      std::vector<PanelRun> runs;
      for (int panel = 0; panel < panels; ++panel) {
        const int set_row = set.row_of(block.row(panel * kernels_.rows).head, group);
        if (runs.empty() || runs.back().set_row != set_row) runs.push_back({panel, panel, set_row});
        runs.back().end = panel + 1;
      }
      return runs;
    };

    for (int chunk = block.first_key() / chunk_keys; chunk * chunk_keys < block.end_key(); ++chunk) {
      const int begin = chunk * chunk_keys;
      const int end = std::min(begin + chunk_keys, block.end_key());
      for (int key = begin; key < end; ++key) {
        float* vector = values + product(key - begin, padded_dim);
        kernels_.widen(layer.v.row(kv_head, key), layer.v.dtype, dim, vector);
        std::fill(vector + dim, vector + padded_dim, 0.0F);
      }
      if (end > boundary) {
        const auto terms = block.later_terms(std::max(begin, boundary), end, values, padded_dim);
        for (int panel = 0; panel < panels; ++panel)
          add(terms, panel, later[static_cast<std::size_t>(panel)], later_values);
      }
      for (std::size_t number = 0; number < distinct.size(); ++number) {
        for (const PanelRun& run : runs_of(*distinct[number])) {
          const auto add_keys = [&](int from, int to, WeightSums PanelSums::* part) {
            if (from >= to) return;
            const auto terms = block.kept_terms(*distinct[number], run, from, to, values, padded_dim);
            for (int panel = run.begin; panel < run.end; ++panel) {
              PanelSums& sums = kept[number * later.size() + static_cast<std::size_t>(panel)];
              add(terms, panel, sums.*part, kept_values + number * block_values);
            }
          };
          add_keys(begin, std::min({end, boundary, sink_tokens}), &PanelSums::sinks);
          add_keys(std::max(begin, sink_tokens), std::min(end, boundary), &PanelSums::rest);
        }
      }
    }

    // A row whose kept keys all lie far below the largest logit: the same sums around the largest kept logit.
    const auto sums_from_logits = [&](const KeptSet& set, int row, double& scale) {
      const auto [head, place] = block.row(row);
      const int set_row = set.row_of(head, group);
      const auto holds = [&](int key) { return key >= boundary || key == place.own || set.keeps(set_row, key); };
      double highest = -HUGE_VAL;
      for (int key = place.first; key < place.end; ++key) {
        if (holds(key)) highest = std::max(highest, block.logit(row, key));
      }
      scale = highest - block.reference(row);
      RowSums sums;
      sums.output.assign(static_cast<std::size_t>(dim), 0.0);
      float* vector = mine.spare.at_least(static_cast<std::size_t>(dim));
      for (int key = place.first; key < place.end; ++key) {
        if (!holds(key)) continue;
        const double weight = std::exp2(block.logit(row, key) - highest);
        (key >= boundary ? sums.later : key < sink_tokens ? sums.sinks : sums.rest) += weight;
        (key >= boundary     ? sums.later_square
         : key < sink_tokens ? sums.sinks_square
                             : sums.rest_square) += weight * weight;
        kernels_.widen(layer.v.row(kv_head, key), layer.v.dtype, dim, vector);
        for (int c = 0; c < dim; ++c)
          sums.output[static_cast<std::size_t>(c)] += weight * static_cast<double>(vector[c]);
      }
      for (double& component : sums.output) component /= sums.total();
      return sums;
    };

    for (int panel = 0; panel < panels; ++panel) {
      const int global_panel = first_panel + panel;
      for (int r = 0; r < kernels_.rows; ++r) {
        const int query = global_panel % panels_a_head * kernels_.rows + r;
        if (query >= query_count) break;
        const int head = kv_head * group + global_panel / panels_a_head;
        const std::size_t cell = product(head, query_count) + static_cast<std::size_t>(query);
        const std::size_t values_at = static_cast<std::size_t>(panel) * panel_values + product(r, padded_dim);
        const auto sums_of = [&](std::size_t number) {
          return row_sums(kept[number * later.size() + static_cast<std::size_t>(panel)],
                          later[static_cast<std::size_t>(panel)], r, kept_values + number * block_values + values_at,
                          later_values + values_at, dim);
        };
        const RowSums full = sums_of(0);
        result.full[cell] = moments_of(full, full, 0.0);
        for (std::size_t set = 0; set < sets.size(); ++set) {
          const std::size_t number = number_of_set[set];
          RowSums sums = sums_of(number);
          double scale = 0.0;
          if (sums.total() < smallest_safe_sum) {
            const double logit_square = sums.logit_square;
            const double unaligned_dot = sums.unaligned_dot;
            sums = sums_from_logits(*distinct[number], panel * kernels_.rows + r, scale);
            sums.logit_square = logit_square;
            sums.unaligned_dot = unaligned_dot;
          }
          result.kept[set * result.full.size() + cell] = moments_of(sums, full, scale);
        }
      }
    }
  };

#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads_)
  for (int kv_head = 0; kv_head < layer.k.heads; ++kv_head) {
    for (int block = 0; block < blocks; ++block) {
      compute_block(scratch(), kv_head, block * panels_a_block,
                    std::min((block + 1) * panels_a_block, group * panels_a_head));
    }
  }
  if (!finite) throw Error{Refusal::input, "attention", "logits", "finite numbers", "others"};
  return result;
}

}  // namespace kvreplay
