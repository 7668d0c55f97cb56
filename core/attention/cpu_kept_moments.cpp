// Sums over the kept keys of many sets from one pass over the attention of the eval queries. "Everything" is a set like
// the others and goes the same way, so a set that keeps all visible keys has its bits. Where the rows of a block hold
// different keys, all go over the keys that some row holds: a key that a row lacks is a weight of zero.
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

KeptSet everything(int tokens) {
  KeptSet set(Heads::layer, 1, tokens);
  for (int position = 0; position < tokens; ++position) set.keep(0, position);
  return set;
}

/// Panels [begin, end) whose heads read the same row of a set.
struct PanelRun {
  int begin = 0;
  int end = 0;
  int set_row = 0;
};

/// The keys of [0, tokens()) that a row of the set keeps, and all after those.
bool holds(const KeptSet& set, int set_row, int key) { return key >= set.tokens() || set.keeps(set_row, key); }

/// A block of query rows of one KV head, head after head, each padded to whole panels; its exponentials and logits
/// turned key-major, so that a key's weights for all rows of a panel lie side by side.
class MomentBlock {
 public:
  MomentBlock(const TileKernels& kernels, int boundary, const SoftmaxBlock& softmax, std::span<const BlockRow> rows,
              std::span<const int> queries)
      : kernels_(kernels), tiles_(softmax.tiles()), boundary_(boundary), rows_(rows), queries_(queries) {
    first_key_ = softmax.first_tile() * kernels.keys;
    tile_shift_ = std::countr_zero(static_cast<unsigned>(kernels.keys));
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
      own_keys_.push_back(row.place.own);
    }
    std::sort(own_keys_.begin(), own_keys_.end());
    own_keys_.erase(std::unique(own_keys_.begin(), own_keys_.end()), own_keys_.end());
    words_.resize(rows.size());
    ranks_.resize(rows.size());
    unseen_.resize(rows.size());
    const std::size_t room = static_cast<std::size_t>(chunk_keys >> tile_shift_) * tile_floats_;
    weights_.resize(room);
    logits_.resize(room);
    unaligned_.resize(room);
  }

  int panels() const { return tiles_.panels; }
  /// Keys that some row may see.
  int first_key() const { return first_key_; }
  int end_key() const { return end_key_; }
  bool row_holds(KeptSets kept, int set_row, int number, int key) const {
    return key == row(number).place.own || holds(set_of(kept, number), set_row, key);
  }

  /// Keys [begin, end) of one chunk, all below the boundary or none: those that some row holds. `values` are those of
  /// the chunk.
  std::span<const WeightedKey> terms(KeptSets kept, const PanelRun& run, int begin, int end, const float* values,
                                     int padded_dim) {
    terms_.clear();
    begin = std::max(begin, first_key_);
    end = std::min(end, end_key_);
    if (begin >= end) return terms_;
    const auto values_of = [&](int key) { return values + product(key % chunk_keys, padded_dim); };
    if (kept.size() == 1) {
      add_terms_of_one_set(kept.front(), run, begin, end, values_of);
    } else {
      add_terms_of_many_sets(kept, run, begin, end, values_of);
    }
    return terms_;
  }

  /// Logit in units of log 2, 0 where the row does not see the key.
  double logit(int row, int key) const { return static_cast<double>(logits(key)[place(row)]); }
  double reference(int row) const { return static_cast<double>(tiles_.reference[row]); }
  const BlockRow& row(int number) const { return rows_[static_cast<std::size_t>(number)]; }
  const KeptSet& set_of(KeptSets kept, int number) const {
    return kept.size() == 1 ? kept.front() : kept[static_cast<std::size_t>(queries_[static_cast<std::size_t>(number)])];
  }

 private:
  /// Of key `number` counted from the begin of a tile, in the first panel; the others follow at the distance of one
  /// piece.
  std::size_t offset(int number) const {
    return static_cast<std::size_t>(number >> tile_shift_) * tile_floats_ +
           product(number & (kernels_.keys - 1), kernels_.rows);
  }
  std::size_t place(int row) const {
    return static_cast<std::size_t>(row / kernels_.rows) * piece_ + static_cast<std::size_t>(row % kernels_.rows);
  }
  const float* weights(int key) const {
    return key < first_key_ ? nothing_.data() : tiles_.exponentials + offset(key - first_key_);
  }
  const float* logits(int key) const { return tiles_.logits + offset(key - first_key_); }
  /// of(row, place of the row in a panel) for all rows of a run.
  template <class Of>
  void for_rows(const PanelRun& run, Of of) const {
    for (int panel = run.begin; panel < run.end; ++panel) {
      const std::size_t at = static_cast<std::size_t>(panel) * piece_;
      for (int r = 0; r < kernels_.rows; ++r) of(panel * kernels_.rows + r, at + static_cast<std::size_t>(r));
    }
  }
  /// Keys below the boundary that the set keeps and that stand before the row's window.
  int unseen(const KeptSet& set, int set_row, int number) const {
    return set.count_within(set_row, 0, std::min(row(number).place.first, boundary_));
  }

  template <class ValuesOf>
  void add_terms_of_one_set(const KeptSet& set, const PanelRun& run, int begin, int end, ValuesOf values_of) {
    const bool ranked = begin < boundary_;
    int rank = ranked ? set.count_within(run.set_row, 0, begin) : 0;
    if (ranked && windowed_) {
      for_rows(run, [&](int number, std::size_t) {
        unseen_[static_cast<std::size_t>(number)] = unseen(set, run.set_row, number);
      });
    }
    auto own = std::lower_bound(own_keys_.begin(), own_keys_.end(), begin);
    for (int key = begin; key < end; ++key) {
      const bool keeps = holds(set, run.set_row, key);
      const bool is_own = own != own_keys_.end() && *own == key;
      if (keeps || is_own) {
        const float* unaligned = !ranked ? nothing_.data() : weights(rank);
        if (ranked && windowed_) {
          float* gathered = unaligned_.data() + offset(static_cast<int>(terms_.size()));
          for_rows(run, [&](int number, std::size_t at) {
            const int seen_rank = rank - unseen_[static_cast<std::size_t>(number)];
            gathered[at] = seen_rank < 0 ? 0.0F : weights(seen_rank)[at];
          });
          unaligned = gathered;
        }
        if (keeps) {
          terms_.push_back({weights(key), logits(key), unaligned, values_of(key)});
        } else {
          add_masked_term(run, key, unaligned, values_of(key),
                          [&](int number) { return row(number).place.own == key; });
        }
      }
      if (keeps) ++rank;
      if (is_own) ++own;
    }
  }

  template <class ValuesOf>
  void add_terms_of_many_sets(KeptSets kept, const PanelRun& run, int begin, int end, ValuesOf values_of) {
    const bool ranked = begin < boundary_;
    if (ranked) {
      for_rows(run, [&](int number, std::size_t) {
        const KeptSet& set = set_of(kept, number);
        ranks_[static_cast<std::size_t>(number)] =
            set.count_within(run.set_row, 0, begin) - unseen(set, run.set_row, number);
      });
    }
    std::uint64_t some = 0;
    std::uint64_t all = 0;
    for (int key = begin; key < end; ++key) {
      if (key == begin || key % 64 == 0) {
        some = 0;
        all = ~std::uint64_t{0};
        for_rows(run, [&](int number, std::size_t) {
          const std::uint64_t word = held_word(kept, run.set_row, number, key / 64);
          words_[static_cast<std::size_t>(number)] = word;
          some |= word;
          all &= word;
        });
      }
      const std::uint64_t bit = std::uint64_t{1} << (key % 64);
      if ((some & bit) == 0) continue;
      const float* unaligned = nothing_.data();
      if (ranked) {
        float* gathered = unaligned_.data() + offset(static_cast<int>(terms_.size()));
        for_rows(run, [&](int number, std::size_t at) {
          int& rank = ranks_[static_cast<std::size_t>(number)];
          gathered[at] = rank < 0 ? 0.0F : weights(rank)[at];
          if ((words_[static_cast<std::size_t>(number)] & bit) != 0) ++rank;
        });
        unaligned = gathered;
      }
      if ((all & bit) != 0) {
        terms_.push_back({weights(key), logits(key), unaligned, values_of(key)});
      } else {
        add_masked_term(run, key, unaligned, values_of(key),
                        [&](int number) { return (words_[static_cast<std::size_t>(number)] & bit) != 0; });
      }
    }
  }

  /// A key that only some rows hold.
  template <class Holds>
  void add_masked_term(const PanelRun& run, int key, const float* unaligned, const float* values, Holds held) {
    const std::size_t masked = offset(static_cast<int>(terms_.size()));
    for_rows(run, [&](int number, std::size_t at) {
      const bool keeps = held(number);
      weights_[masked + at] = keeps ? weights(key)[at] : 0.0F;
      logits_[masked + at] = keeps ? logits(key)[at] : 0.0F;
    });
    terms_.push_back({weights_.data() + masked, logits_.data() + masked, unaligned, values});
  }

  /// Which of the keys [64 word, 64 word + 64) a row holds.
  std::uint64_t held_word(KeptSets kept, int set_row, int number, int word) const {
    const KeptSet& set = set_of(kept, number);
    const int known = set.tokens() - 64 * word;  // of these keys, the set covers so many
    const int own = row(number).place.own - 64 * word;
    std::uint64_t held = known > 0 ? set.row_bits(set_row)[static_cast<std::size_t>(word)] : 0;
    if (known < 64) held |= ~std::uint64_t{0} << std::max(known, 0);
    if (own >= 0 && own < 64) held |= std::uint64_t{1} << own;
    return held;
  }

  const TileKernels& kernels_;
  const TileBlock& tiles_;
  int boundary_;
  std::span<const BlockRow> rows_;
  std::span<const int> queries_;  // the number of each row's query
  int first_key_ = 0;
  int end_key_ = 0;
  bool windowed_ = false;
  int tile_shift_ = 0;
  std::size_t piece_ = 0;
  std::size_t tile_floats_ = 0;
  std::vector<int> own_keys_;  // ascending
  std::vector<float> nothing_;
  std::vector<float> weights_, logits_, unaligned_;  // of the terms of one chunk that are not as they lie
  std::vector<std::uint64_t> words_;                 // keys that each row holds
  std::vector<int> ranks_;                           // number of the next key among those that each row holds and sees
  std::vector<int> unseen_;                          // kept keys that lie before each row's window
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

/// Sums of one panel over one set below the boundary.
struct PanelSums {
  WeightSums sinks, rest;
};

/// Kept sets to compute, and where their sums from the boundary on are found: with those of "everything" unless the
/// sets go beyond it.
struct DistinctSets {
  KeptSets kept;
  std::size_t later = 0;

  bool operator==(const DistinctSets& other) const { return std::ranges::equal(kept, other.kept); }
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
                                     std::span<const KeptSets> kept) {
  const int query_count = static_cast<int>(queries.size());
  const int group = layer.group();
  KeptMoments result;
  result.full.resize(product(layer.q.heads, query_count));
  result.kept.resize(kept.size() * result.full.size());
  if (query_count == 0) return result;

  const Participants participants{.count = queries.back() + 1};
  const TileForm& form = form_of(kernels_, layer, participants);
  const std::vector<QueryPlace> places = query_places(layer, queries, participants);
  const KeptSet all = everything(boundary);
  // The sets to compute, `all` first; equal sets are computed once.
  std::vector<DistinctSets> distinct{{{&all, 1}}};
  std::vector<std::size_t> number_of_set;
  std::size_t later_count = 1;
  for (const KeptSets sets : kept) {
    assert(sets.size() == 1 || sets.size() == queries.size());
    assert(std::ranges::all_of(sets, [&](const KeptSet& set) { return set.tokens() >= boundary; }));
    const bool constant = std::ranges::all_of(sets, [&](const KeptSet& set) { return set == sets.front(); });
    DistinctSets wanted{constant ? sets.first(1) : sets};
    const auto same = std::ranges::find(distinct, wanted);
    number_of_set.push_back(static_cast<std::size_t>(same - distinct.begin()));
    if (same != distinct.end()) continue;
    if (std::ranges::any_of(sets, [&](const KeptSet& set) { return set.tokens() > boundary; }))
      wanted.later = later_count++;
    distinct.push_back(wanted);
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
    std::vector<int> row_queries;
    for (int panel = first_panel; panel < end_panel; ++panel) {
      for (int r = 0; r < kernels_.rows; ++r) {
        const int query = std::min(panel % panels_a_head * kernels_.rows + r, query_count - 1);
        row_queries.push_back(query);
        mine.rows.push_back({kv_head * group + panel / panels_a_head, places[static_cast<std::size_t>(query)]});
      }
    }
    mine.block.prepare(layer, form, mine.rows, true);
    const bool computed = mine.block.compute([&](int tile) -> const float* {
      float* keys_of_tile = mine.keys.at_least(product(form.cells(layer.k.dim), kernels_.keys));
      pack_keys(kernels_, form, layer, kv_head, participants, tile, mine.staging, keys_of_tile);
      return keys_of_tile;
    });
    if (!computed) {
      finite = false;
      return;
    }

    MomentBlock block(kernels_, boundary, mine.block, mine.rows, row_queries);
    const auto panels = static_cast<std::size_t>(block.panels());
    std::vector<PanelSums> below(distinct.size() * panels);
    std::vector<WeightSums> later(later_count * panels);
    const std::size_t block_values = panels * panel_values;
    double* below_values = mine.sums.at_least((distinct.size() + later_count) * block_values);
    double* later_values = below_values + distinct.size() * block_values;
    std::fill_n(below_values, (distinct.size() + later_count) * block_values, 0.0);
    float* values = mine.values.at_least(product(chunk_keys, padded_dim));

    const auto add = [&](std::span<const WeightedKey> terms, int panel, WeightSums& sums, double* weighted_values) {
      const int count = static_cast<int>(terms.size());
      kernels_.add_weights(terms.data(), count, panel, sums);
      kernels_.add_weighted_values(terms.data(), count, panel, padded_dim,
                                   weighted_values + static_cast<std::size_t>(panel) * panel_values);
    };
    const auto runs_of = [&](const KeptSet& set) {
      std::vector<PanelRun> runs;
      for (int panel = 0; panel < block.panels(); ++panel) {
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
      for (std::size_t number = 0; number < distinct.size(); ++number) {
        const DistinctSets& sets = distinct[number];
        for (const PanelRun& run : runs_of(sets.kept.front())) {
          const auto add_keys = [&](int from, int to, double* into, auto sums_of) {
            if (from >= to) return;
            const auto terms = block.terms(sets.kept, run, from, to, values, padded_dim);
            for (int panel = run.begin; panel < run.end; ++panel)
              add(terms, panel, sums_of(static_cast<std::size_t>(panel)), into);
          };
          double* into = below_values + number * block_values;
          add_keys(begin, std::min({end, boundary, sink_tokens}), into,
                   [&](std::size_t panel) -> WeightSums& { return below[number * panels + panel].sinks; });
          add_keys(std::max(begin, sink_tokens), std::min(end, boundary), into,
                   [&](std::size_t panel) -> WeightSums& { return below[number * panels + panel].rest; });
          if (number > 0 && sets.later == 0) continue;
          add_keys(std::max(begin, boundary), end, later_values + sets.later * block_values,
                   [&](std::size_t panel) -> WeightSums& { return later[sets.later * panels + panel]; });
        }
      }
    }

    // A row whose kept keys all lie far below the largest logit: the same sums around the largest kept logit.
    const auto sums_from_logits = [&](KeptSets sets, int row, double& scale) {
      const auto [head, place] = block.row(row);
      const int set_row = sets.front().row_of(head, group);
      double highest = -HUGE_VAL;
      for (int key = place.first; key < place.end; ++key) {
        if (block.row_holds(sets, set_row, row, key)) highest = std::max(highest, block.logit(row, key));
      }
      scale = highest - block.reference(row);
      RowSums sums;
      sums.output.assign(static_cast<std::size_t>(dim), 0.0);
      float* vector = mine.spare.at_least(static_cast<std::size_t>(dim));
      for (int key = place.first; key < place.end; ++key) {
        if (!block.row_holds(sets, set_row, row, key)) continue;
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

    for (int panel = 0; panel < block.panels(); ++panel) {
      const int global_panel = first_panel + panel;
      for (int r = 0; r < kernels_.rows; ++r) {
        const int query = global_panel % panels_a_head * kernels_.rows + r;
        if (query >= query_count) break;
        const int head = kv_head * group + global_panel / panels_a_head;
        const std::size_t cell = product(head, query_count) + static_cast<std::size_t>(query);
        const std::size_t values_at = static_cast<std::size_t>(panel) * panel_values + product(r, padded_dim);
        const auto sums_of = [&](std::size_t number) {
          const std::size_t at = static_cast<std::size_t>(panel);
          const std::size_t part = distinct[number].later;
          return row_sums(below[number * panels + at], later[part * panels + at], r,
                          below_values + number * block_values + values_at,
                          later_values + part * block_values + values_at, dim);
        };
        const RowSums full = sums_of(0);
        result.full[cell] = moments_of(full, full, 0.0);
        for (std::size_t set = 0; set < kept.size(); ++set) {
          const std::size_t number = number_of_set[set];
          RowSums sums = sums_of(number);
          double scale = 0.0;
          if (sums.total() < smallest_safe_sum) {
            const double logit_square = sums.logit_square;
            const double unaligned_dot = sums.unaligned_dot;
            sums = sums_from_logits(distinct[number].kept, panel * kernels_.rows + r, scale);
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
