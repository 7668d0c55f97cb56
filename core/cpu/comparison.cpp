// The general comparison, plainly: two softmaxes written out in float64.
#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>
#include <numeric>

#include "attention/rope.h"
#include "attention/row_sums.h"
#include "cpu/cpu_backend.h"

namespace kvreplay {
namespace {

// Rows that read each key once.
constexpr int rows_at_once = 48;
// Keys whose values are widened at a time.
constexpr int chunk_keys = 256;

std::size_t at(int i) { return static_cast<std::size_t>(i); }

struct Row {
  int head = 0;
  int query = 0;
  QueryPlace place;
};

/// Logits -> weights in place; -infinity is a key that does not take part, or no sink logit.
void softmax(std::span<double> row, double sink) {
  const double highest = *std::max_element(row.begin(), row.end());
  double sum = sink_weight(sink * std::numbers::log2e, highest * std::numbers::log2e);
  for (double& x : row) {
    x = x == -HUGE_VAL ? 0.0 : std::exp(x - highest);
    if (x < least_weight) x = 0.0;
    sum += x;
  }
  for (double& x : row) x /= sum;
}

void add(Alignment& alignment, double full, double stored) {
  alignment.dot += full * stored;
  alignment.full_square += full * full;
  alignment.stored_square += stored * stored;
}

void widen(const TileKernels& kernels, ThreadScratch& mine, const TensorView& tensor, int head, int token,
           double* out) {
  float* vector = mine.staging.at_least(at(tensor.dim));
  kernels.widen(tensor.row(head, token), tensor.dtype, tensor.dim, vector);
  std::copy_n(vector, tensor.dim, out);
}

/// out(i, j, <row i, key j>); row_vector(i, at) and key_vector(j, at) write vectors of `dim` numbers.
void for_products(const TileKernels& kernels, ThreadScratch& mine, int dim, int rows, int keys, const auto& row_vector,
                  const auto& key_vector, const auto& out) {
  const int panels = (rows + kernels.rows - 1) / kernels.rows;
  double* packed_rows = mine.wide_rows.at_least(product(panels * kernels.rows, dim));
  double* vectors = mine.sums.at_least(product(std::max(kernels.rows, kernels.wide_keys), dim));
  double* packed_keys = mine.wide_keys.at_least(product(kernels.wide_keys, dim));
  double* products = mine.wide_products.at_least(product(kernels.rows, kernels.wide_keys));
  for (int first = 0; first < rows; first += kernels.rows) {
    const int count = std::min(kernels.rows, rows - first);
    for (int r = 0; r < count; ++r) row_vector(first + r, vectors + product(r, dim));
    kernels.wide_pack(vectors, count, dim, kernels.rows, packed_rows + product(first, dim));
  }
  for (int begin = 0; begin < keys; begin += kernels.wide_keys) {
    const int count = std::min(kernels.wide_keys, keys - begin);
    for (int i = 0; i < count; ++i) key_vector(begin + i, vectors + product(i, dim));
    kernels.wide_pack(vectors, count, dim, kernels.wide_keys, packed_keys);
    for (int first = 0; first < rows; first += kernels.rows) {
      const int some = std::min(kernels.rows, rows - first);
      kernels.wide_products(packed_rows + product(first, dim), packed_keys, dim, some, products);
      for (int r = 0; r < some; ++r)
        for (int i = 0; i < count; ++i) out(first + r, begin + i, products[product(r, kernels.wide_keys) + at(i)]);
    }
  }
}

double logit(const LayerTensors& layer, double product) {
  const double z = static_cast<double>(layer.softmax_scale) * product;
  const double cap = static_cast<double>(layer.logit_softcap);
  return cap > 0.0 ? cap * std::tanh(z / cap) : z;
}

/// weights[rows, width] * values -> [rows, padded], a multiple of wide_keys numbers for each row; value(i, at) writes
/// the value of column i. Columns that no row weighs add nothing, and their values are not read.
std::vector<double> weighted_sums(const TileKernels& kernels, ThreadScratch& mine, std::span<const double> weights,
                                  int rows, int width, int padded, const auto& value) {
  std::vector<double> outputs(product(rows, padded));
  double* packed_weights = mine.wide_rows.at_least(product(kernels.rows, chunk_keys));
  double* vector = mine.sums.at_least(at(padded));
  double* packed_values = mine.wide_keys.at_least(product(chunk_keys, padded));
  double* products = mine.wide_products.at_least(product(kernels.rows, kernels.wide_keys));
  std::fill_n(vector, padded, 0.0);
  std::array<int, chunk_keys> columns;
  for (int begin = 0; begin < width; begin += chunk_keys) {
    int count = 0;
    for (int i = begin; i < std::min(begin + chunk_keys, width); ++i) {
      bool weighs = false;
      for (int row = 0; row < rows; ++row) weighs |= weights[product(row, width) + at(i)] != 0.0;
      if (weighs) columns[at(count++)] = i;
    }
    // [padded / wide_keys, chunk_keys, wide_keys]
    for (int i = 0; i < count; ++i) {
      value(columns[at(i)], vector);
      for (int c = 0; c < padded; c += kernels.wide_keys)
        std::copy_n(vector + c, kernels.wide_keys,
                    packed_values + product(c, chunk_keys) + product(i, kernels.wide_keys));
    }
    for (int first = 0; first < rows; first += kernels.rows) {
      const int some = std::min(kernels.rows, rows - first);
      for (int i = 0; i < count; ++i)
        for (int r = 0; r < kernels.rows; ++r)
          packed_weights[product(i, kernels.rows) + at(r)] =
              r < some ? weights[product(first + r, width) + at(columns[at(i)])] : 0.0;
      for (int c = 0; c < padded; c += kernels.wide_keys) {
        kernels.wide_products(packed_weights, packed_values + product(c, chunk_keys), count, some, products);
        for (int r = 0; r < some; ++r)
          for (int i = 0; i < kernels.wide_keys; ++i)
            outputs[product(first + r, padded) + at(c + i)] += products[product(r, kernels.wide_keys) + at(i)];
      }
    }
  }
  return outputs;
}

/// Rows of one KV head, and their full attention to keys [first_key, end_key).
struct Block {
  Block(const LayerTensors& of_layer, std::span<const QueryPlace> places, int of_head, int first_query, int end_query)
      : layer(of_layer), kv_head(of_head), queries(end_query - first_query) {
    const int group = layer.group();
    first_key = std::numeric_limits<int>::max();
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int query = first_query; query < end_query; ++query) {
        const QueryPlace& place = places[at(query)];
        rows.push_back({head, query, place});
        first_key = std::min(first_key, place.first);
        end_key = std::max(end_key, place.end);
      }
    }
  }

  int row_count() const { return static_cast<int>(rows.size()); }
  int width() const { return end_key - first_key; }
  std::size_t column(int row, int key) const { return product(row, width()) + at(key - first_key); }
  bool sees(int row, int key) const { return key >= rows[at(row)].place.first && key < rows[at(row)].place.end; }
  std::vector<double> no_logits() const { return std::vector<double>(product(row_count(), width()), -HUGE_VAL); }
  void make_weights(std::vector<double>& of_rows) const {
    for (int row = 0; row < row_count(); ++row)
      softmax(std::span(of_rows).subspan(product(row, width()), at(width())), layer.sink(rows[at(row)].head));
  }

  /// Logits, weights and outputs.
  void attend(const TileKernels& kernels, ThreadScratch& mine, int padded) {
    logits = no_logits();
    for_products(
        kernels, mine, layer.q.dim, row_count(), width(),
        [&](int row, double* out) {
          widen(kernels, mine, layer.q, rows[at(row)].head, rows[at(row)].place.stored, out);
        },
        [&](int i, double* out) { widen(kernels, mine, layer.k, kv_head, first_key + i, out); },
        [&](int row, int i, double product) {
          if (sees(row, first_key + i)) logits[column(row, first_key + i)] = logit(layer, product);
        });
    weights = logits;
    make_weights(weights);
    outputs = weighted_sums(kernels, mine, weights, row_count(), width(), padded,
                            [&](int i, double* out) { widen(kernels, mine, layer.v, kv_head, first_key + i, out); });
  }

  const LayerTensors& layer;
  int kv_head;
  int queries;  // of each query head
  int first_key = 0;
  int end_key = 0;
  std::vector<Row> rows;                // query heads, the queries of each
  std::vector<double> logits, weights;  // [rows, width]
  std::vector<double> outputs;          // [rows, padded]
};

/// No key of a set moves by more than the number of those that went.
int farthest_move(std::span<const ChangedSet> sets) {
  int farthest = 0;
  for (const ChangedSet& set : sets) {
    if (set.positions != Positions::cache) continue;
    for (const KeptSet& kept : set.kept)
      for (int row = 0; row < kept.rows(); ++row) farthest = std::max(farthest, kept.tokens() - kept.count(row));
  }
  return farthest;
}

/// A set's attention in a block.
class ChangedBlock {
 public:
  ChangedBlock(const TileKernels& kernels, ThreadScratch& mine, const BackwardRotation& rotation,
               const ChangedSet& changed, const Block& block, int boundary)
      : kernels_(kernels),
        mine_(mine),
        rotation_(rotation),
        changed_(changed),
        block_(block),
        boundary_(boundary),
        weights_(block.no_logits()) {
    for (const Row& row : block.rows) {
      const KeptSet& kept = changed.kept[changed.kept.size() == 1 ? 0 : at(row.query)];
      sets_.push_back({&kept, kept.row_of(row.head, block.layer.group())});
    }
  }

  std::vector<Comparison> compare() {
    if (!moves() && changed_.stored.k.data == block_.layer.k.data) {
      copy_logits();
    } else {
      compute_logits();
    }
    std::vector<Comparison> compared(block_.rows.size());
    for (int row = 0; row < block_.row_count(); ++row) compare_logits(row, compared[at(row)].logits);
    if (changed_.weights != nullptr) weigh_tokens();
    block_.make_weights(weights_);
    for (int row = 0; row < block_.row_count(); ++row) compare_weights(row, compared[at(row)]);
    return compared;
  }

  /// [rows, padded], after compare().
  std::vector<double> outputs(int padded) const {
    if (changed_.values != nullptr) return evolving_outputs(padded);
    return weighted_sums(kernels_, mine_, weights_, block_.row_count(), block_.width(), padded,
                         [&](int i, double* out) {
                           widen(kernels_, mine_, changed_.stored.v, block_.kv_head, block_.first_key + i, out);
                         });
  }

 private:
  struct RowOfSet {
    const KeptSet* set;
    int row;
    bool operator==(const RowOfSet&) const = default;
  };

  bool moves() const { return changed_.positions == Positions::cache; }  // resident keys up to their slots
  bool resident(int row, int key) const {
    const auto& [set, of_set] = sets_[at(row)];
    return key >= set->tokens() || set->keeps(of_set, key);
  }
  bool holds(int row, int key) const { return key == block_.rows[at(row)].place.own || resident(row, key); }

  void copy_logits() {
    for (int row = 0; row < block_.row_count(); ++row) {
      const QueryPlace& place = block_.rows[at(row)].place;
      for (int key = place.first; key < place.end; ++key)
        if (holds(row, key)) weights_[block_.column(row, key)] = block_.logits[block_.column(row, key)];
    }
  }

  /// Rows that read the same keys at the same places: all, unless keys move as a set says.
  std::vector<std::vector<int>> rows_of_same_places() const {
    std::vector<std::vector<int>> groups;
    for (int row = 0; row < block_.row_count(); ++row) {
      const auto same = std::ranges::find_if(
          groups, [&](const std::vector<int>& some) { return !moves() || sets_[at(some.front())] == sets_[at(row)]; });
      if (same == groups.end()) {
        groups.push_back({row});
      } else {
        same->push_back(row);
      }
    }
    return groups;
  }

  void compute_logits() {
    const LayerTensors& layer = block_.layer;
    const TensorView& stored_keys = changed_.stored.k;
    std::vector<int> keys;                       // that some row holds
    std::vector<int> moved(at(block_.end_key));  // by how much each is nearer the beginning, negative
    for (const std::vector<int>& members : rows_of_same_places()) {
      int slot = 0;
      for (int key = 0; moves() && key < block_.end_key; ++key) {
        moved[at(key)] = slot - key;
        if (resident(members.front(), key)) ++slot;
      }
      keys.clear();
      for (int key = block_.first_key; key < block_.end_key; ++key)
        if (std::ranges::any_of(members, [&](int row) { return holds(row, key); })) keys.push_back(key);
      for_products(
          kernels_, mine_, layer.q.dim, static_cast<int>(members.size()), static_cast<int>(keys.size()),
          [&](int member, double* out) {
            const Row& row = block_.rows[at(members[at(member)])];
            widen(kernels_, mine_, layer.q, row.head, row.place.stored, out);
            rotation_.apply(moved[at(row.place.own)], {out, at(layer.q.dim)});
          },
          [&](int i, double* out) {
            widen(kernels_, mine_, stored_keys, block_.kv_head, keys[at(i)], out);
            rotation_.apply(moved[at(keys[at(i)])], {out, at(stored_keys.dim)});
          },
          [&](int member, int i, double product) {
            const int row = members[at(member)];
            const int key = keys[at(i)];
            if (block_.sees(row, key) && holds(row, key)) weights_[block_.column(row, key)] = logit(layer, product);
          });
    }
  }

  void compare_logits(int row, Alignment& logits) const {
    const QueryPlace& place = block_.rows[at(row)].place;
    for (int key = place.first; key < std::min(boundary_, place.end); ++key) {
      const double stored = weights_[block_.column(row, key)];
      add(logits, block_.logits[block_.column(row, key)], stored == -HUGE_VAL ? 0.0 : stored);
    }
  }

  void weigh_tokens() {
    for (int row = 0; row < block_.row_count(); ++row) {
      const auto& [head, query, place] = block_.rows[at(row)];
      (*changed_.weights)(head, place.own, place.first,
                          std::span(weights_).subspan(block_.column(row, place.first), at(place.end - place.first)));
    }
  }

  void compare_weights(int row, Comparison& comparison) const {
    const QueryPlace& place = block_.rows[at(row)].place;
    const auto first = block_.column(row, place.first);
    const std::span full = std::span(block_.weights).subspan(first, at(place.end - place.first));
    const std::span stored = std::span(weights_).subspan(first, full.size());
    if (!block_.layer.sinks.empty()) comparison.full_mass = std::accumulate(full.begin(), full.end(), 0.0);
    for (int key = place.first; key < place.end; ++key) {
      const auto i = at(key - place.first);
      add(comparison.all, full[i], stored[i]);
      if (key < boundary_) add(comparison.prompt, full[i], stored[i]);
      if (key < boundary_ && key >= sink_tokens) add(comparison.nosink, full[i], stored[i]);
      comparison.l1 += std::abs(full[i] - stored[i]);
      if (holds(row, key)) comparison.mass += full[i];
    }
  }

  std::vector<double> evolving_outputs(int padded) const {
    const int heads = block_.row_count() / block_.queries;
    const EvolvingValues::Reader values_before = changed_.values->of_head(block_.kv_head);
    std::vector<double> outputs(product(block_.row_count(), padded)), weights;
    for (int query = 0; query < block_.queries; ++query) {
      const Row& one = block_.rows[at(query)];
      const int width = one.place.end - one.place.first;
      const std::span<const float> values = values_before(one.place.own);
      weights.clear();
      for (int head = 0; head < heads; ++head) {
        const auto begin = weights_.begin() +
                           static_cast<std::ptrdiff_t>(block_.column(head * block_.queries + query, one.place.first));
        weights.insert(weights.end(), begin, begin + width);
      }
      const auto dim = at(block_.layer.v.dim);
      const std::vector<double> of_query = weighted_sums(
          kernels_, mine_, weights, heads, width, padded,
          [&](int i, double* out) { std::ranges::copy(values.subspan(at(one.place.first + i) * dim, dim), out); });
      for (int head = 0; head < heads; ++head)
        std::copy_n(&of_query[product(head, padded)], padded, &outputs[product(head * block_.queries + query, padded)]);
    }
    return outputs;
  }

  const TileKernels& kernels_;
  ThreadScratch& mine_;
  const BackwardRotation& rotation_;
  const ChangedSet& changed_;
  const Block& block_;
  int boundary_;
  std::vector<RowOfSet> sets_;   // of each row
  std::vector<double> weights_;  // [rows, width]: logits, then weights
};

/// Adds the comparison of one row's outputs, [dim] numbers each; writes them where `vectors` is there.
void compare_outputs(std::span<const double> full, std::span<const double> kept, Comparison& comparison,
                     OutputVectors& vectors, std::size_t cell) {
  for (std::size_t c = 0; c < full.size(); ++c) {
    if (!vectors.full.empty()) {
      vectors.full[cell * full.size() + c] = static_cast<float>(full[c]);
      vectors.errors[cell * full.size() + c] = static_cast<float>(kept[c] - full[c]);
    }
    comparison.output_full_square += full[c] * full[c];
    comparison.output_square += kept[c] * kept[c];
    comparison.output_dot += full[c] * kept[c];
    comparison.error_square += (full[c] - kept[c]) * (full[c] - kept[c]);
  }
}

}  // namespace

std::vector<ComparedSet> CpuBackend::compare_sets(const LayerTensors& layer, std::span<const ChangedSet> sets,
                                                  std::span<const std::int32_t> queries, int boundary, bool vectors) {
  const int query_count = static_cast<int>(queries.size());
  const auto dim = at(layer.v.dim);
  std::vector<ComparedSet> result(sets.size());
  for (std::size_t i = 0; i < sets.size(); ++i) {
    assert(sets[i].kept.size() == 1 || sets[i].kept.size() == queries.size());
    result[i].comparisons.resize(product(layer.q.heads, query_count));
    if (!vectors) continue;
    result[i].outputs.full.assign(result[i].comparisons.size() * dim, 0.0F);
    result[i].outputs.errors = result[i].outputs.full;
  }
  if (query_count == 0 || sets.empty()) return result;
  const std::vector<QueryPlace> places = query_places(layer, queries, {.count = queries.back() + 1});
  const BackwardRotation rotation(layer.rope, farthest_move(sets));
  const int padded = (layer.v.dim + kernels_.wide_keys - 1) / kernels_.wide_keys * kernels_.wide_keys;
  const int queries_at_once = std::max(1, rows_at_once / layer.group());
  const int blocks = (query_count + queries_at_once - 1) / queries_at_once;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads_)
  for (int kv_head = 0; kv_head < layer.k.heads; ++kv_head) {
    for (int number = 0; number < blocks; ++number) {
      if (interruption().ended()) continue;
      ThreadScratch& mine = scratch();
      const int first_query = number * queries_at_once;
      Block block(layer, places, kv_head, first_query, std::min(first_query + queries_at_once, query_count));
      block.attend(kernels_, mine, padded);
      for (std::size_t i = 0; i < sets.size() && !interruption().ended(); ++i) {
        ChangedBlock changed(kernels_, mine, rotation, sets[i], block, boundary);
        std::vector<Comparison> compared = changed.compare();
        const std::vector<double> outputs = changed.outputs(padded);
        for (int row = 0; row < block.row_count(); ++row) {
          const std::size_t cell = product(block.rows[at(row)].head, query_count) + at(block.rows[at(row)].query);
          compare_outputs(std::span(block.outputs).subspan(product(row, padded), dim),
                          std::span(outputs).subspan(product(row, padded), dim), compared[at(row)], result[i].outputs,
                          cell);
          result[i].comparisons[cell] = compared[at(row)];
        }
      }
    }
  }
  interruption().require_all_done();
  return result;
}

}  // namespace kvreplay
