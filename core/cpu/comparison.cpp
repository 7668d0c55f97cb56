// The general comparison, plainly: two softmaxes written out in float64.
#include <algorithm>
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
  int set_row = 0;
  QueryPlace place;
};

/// Logits -> weights in place; -infinity is a key that does not take part, or no sink logit.
void softmax(std::span<double> row, double sink) {
  const double highest = *std::max_element(row.begin(), row.end());
  double sum = sink_weight(sink * std::numbers::log2e, highest * std::numbers::log2e);
  for (double& x : row) {
    x = std::exp(x - highest);
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

/// What all blocks of one comparison share.
struct Inputs {
  const LayerTensors& layer;
  const LayerTensors& stored;
  KeptSets kept;
  std::vector<QueryPlace> places;  // of each query
  bool moves;                      // resident keys have moved up
  BackwardRotation rotation;
  int boundary;

  const KeptSet& set_of(const Row& row) const { return kept[kept.size() == 1 ? 0 : at(row.query)]; }
  bool resident(const Row& row, int key) const {
    const KeptSet& set = set_of(row);
    return key >= set.tokens() || set.keeps(row.set_row, key);
  }
  bool holds(const Row& row, int key) const { return key == row.place.own || resident(row, key); }
  double logit(double product) const {
    const double z = static_cast<double>(layer.softmax_scale) * product;
    const double cap = static_cast<double>(layer.logit_softcap);
    return cap > 0.0 ? cap * std::tanh(z / cap) : z;
  }
};

/// Rows of one KV head, and their attention to keys [first_key, end_key).
struct Block {
  Block(const Inputs& inputs, int of_head, int first_query, int end_query) : kv_head(of_head) {
    const int group = inputs.layer.group();
    first_key = std::numeric_limits<int>::max();
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int query = first_query; query < end_query; ++query) {
        const QueryPlace& place = inputs.places[at(query)];
        rows.push_back({head, query, inputs.kept.front().row_of(head, group), place});
        first_key = std::min(first_key, place.first);
        end_key = std::max(end_key, place.end);
      }
    }
    full.assign(product(row_count(), width()), -HUGE_VAL);
    stored = full;
  }

  int row_count() const { return static_cast<int>(rows.size()); }
  int width() const { return end_key - first_key; }
  std::size_t column(int row, int key) const { return product(row, width()) + at(key - first_key); }
  bool sees(int row, int key) const { return key >= rows[at(row)].place.first && key < rows[at(row)].place.end; }

  int kv_head;
  int first_key = 0;
  int end_key = 0;
  std::vector<Row> rows;
  std::vector<double> full, stored;  // [rows, width]: logits, then weights
};

void fill_full_logits(const TileKernels& kernels, ThreadScratch& mine, const Inputs& inputs, Block& block) {
  const LayerTensors& layer = inputs.layer;
  for_products(
      kernels, mine, layer.q.dim, block.row_count(), block.width(),
      [&](int row, double* out) {
        widen(kernels, mine, layer.q, block.rows[at(row)].head, block.rows[at(row)].place.stored, out);
      },
      [&](int key, double* out) { widen(kernels, mine, layer.k, block.kv_head, block.first_key + key, out); },
      [&](int row, int i, double product) {
        const int key = block.first_key + i;
        if (block.sees(row, key)) block.full[block.column(row, key)] = inputs.logit(product);
      });
}

/// Rows that read the same keys at the same places: all, unless keys move as a set says.
std::vector<std::vector<int>> rows_of_same_places(const Inputs& inputs, std::span<const Row> rows) {
  std::vector<std::vector<int>> groups;
  for (int row = 0; row < static_cast<int>(rows.size()); ++row) {
    const auto same = std::ranges::find_if(groups, [&](const std::vector<int>& some) {
      const Row& other = rows[at(some.front())];
      return !inputs.moves ||
             (&inputs.set_of(other) == &inputs.set_of(rows[at(row)]) && other.set_row == rows[at(row)].set_row);
    });
    if (same == groups.end()) {
      groups.push_back({row});
    } else {
      same->push_back(row);
    }
  }
  return groups;
}

void fill_stored_logits(const TileKernels& kernels, ThreadScratch& mine, const Inputs& inputs, Block& block) {
  const LayerTensors& layer = inputs.layer;
  const TensorView& stored_keys = inputs.stored.k;
  std::vector<int> keys;                      // that some row holds
  std::vector<int> moved(at(block.end_key));  // by how much each is nearer the beginning, negative
  for (const std::vector<int>& members : rows_of_same_places(inputs, block.rows)) {
    const Row& one = block.rows[at(members.front())];
    int slot = 0;
    for (int key = 0; inputs.moves && key < block.end_key; ++key) {
      moved[at(key)] = slot - key;
      if (inputs.resident(one, key)) ++slot;
    }
    keys.clear();
    for (int key = block.first_key; key < block.end_key; ++key)
      if (std::ranges::any_of(members, [&](int row) { return inputs.holds(block.rows[at(row)], key); }))
        keys.push_back(key);
    for_products(
        kernels, mine, layer.q.dim, static_cast<int>(members.size()), static_cast<int>(keys.size()),
        [&](int member, double* out) {
          const Row& row = block.rows[at(members[at(member)])];
          widen(kernels, mine, layer.q, row.head, row.place.stored, out);
          inputs.rotation.apply(moved[at(row.place.own)], {out, at(layer.q.dim)});
        },
        [&](int i, double* out) {
          widen(kernels, mine, stored_keys, block.kv_head, keys[at(i)], out);
          inputs.rotation.apply(moved[at(keys[at(i)])], {out, at(stored_keys.dim)});
        },
        [&](int member, int i, double product) {
          const int row = members[at(member)];
          const int key = keys[at(i)];
          if (block.sees(row, key) && inputs.holds(block.rows[at(row)], key))
            block.stored[block.column(row, key)] = inputs.logit(product);
        });
  }
}

/// Compares logits, makes weights of them, and compares these.
std::vector<Comparison> compare_weights(const Inputs& inputs, Block& block) {
  std::vector<Comparison> compared(block.rows.size());
  for (int row = 0; row < block.row_count(); ++row) {
    const QueryPlace& place = block.rows[at(row)].place;
    const auto some = at(place.end - place.first);
    const std::span<double> full = std::span(block.full).subspan(block.column(row, place.first), some);
    const std::span<double> stored = std::span(block.stored).subspan(block.column(row, place.first), some);
    Comparison& comparison = compared[at(row)];
    for (int key = place.first; key < std::min(inputs.boundary, place.end); ++key) {
      const auto i = at(key - place.first);
      add(comparison.logits, full[i], stored[i] == -HUGE_VAL ? 0.0 : stored[i]);
    }
    const double sink = inputs.layer.sink(block.rows[at(row)].head);
    softmax(std::span(block.full).subspan(product(row, block.width()), at(block.width())), sink);
    softmax(std::span(block.stored).subspan(product(row, block.width()), at(block.width())), sink);
    if (!inputs.layer.sinks.empty()) comparison.full_mass = std::accumulate(full.begin(), full.end(), 0.0);
    for (int key = place.first; key < place.end; ++key) {
      const auto i = at(key - place.first);
      add(comparison.all, full[i], stored[i]);
      if (key < inputs.boundary) add(comparison.prompt, full[i], stored[i]);
      if (key < inputs.boundary && key >= sink_tokens) add(comparison.nosink, full[i], stored[i]);
      comparison.l1 += std::abs(full[i] - stored[i]);
      if (inputs.holds(block.rows[at(row)], key)) comparison.mass += full[i];
    }
  }
  return compared;
}

/// weights[rows, width] * values -> [rows, padded], a multiple of wide_keys numbers for each row.
std::vector<double> outputs_of(const TileKernels& kernels, ThreadScratch& mine, const Block& block,
                               const TensorView& values, std::span<const double> weights, int padded) {
  const int rows = block.row_count();
  const int width = block.width();
  std::vector<double> outputs(product(rows, padded));
  double* packed_weights = mine.wide_rows.at_least(product(kernels.rows, chunk_keys));
  double* vector = mine.sums.at_least(at(padded));
  double* packed_values = mine.wide_keys.at_least(product(chunk_keys, padded));
  double* products = mine.wide_products.at_least(product(kernels.rows, kernels.wide_keys));
  std::fill_n(vector, padded, 0.0);
  for (int begin = 0; begin < width; begin += chunk_keys) {
    const int count = std::min(chunk_keys, width - begin);
    // [padded / wide_keys, chunk_keys, wide_keys]
    for (int i = 0; i < count; ++i) {
      widen(kernels, mine, values, block.kv_head, block.first_key + begin + i, vector);
      for (int c = 0; c < padded; c += kernels.wide_keys)
        std::copy_n(vector + c, kernels.wide_keys,
                    packed_values + product(c, chunk_keys) + product(i, kernels.wide_keys));
    }
    for (int first = 0; first < rows; first += kernels.rows) {
      const int some = std::min(kernels.rows, rows - first);
      for (int i = 0; i < count; ++i)
        for (int r = 0; r < kernels.rows; ++r)
          packed_weights[product(i, kernels.rows) + at(r)] =
              r < some ? weights[product(first + r, width) + at(begin + i)] : 0.0;
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

/// Adds the comparison of one row's outputs, [dim] numbers each; writes them where `vectors` is there.
void compare_outputs(std::span<const double> full, std::span<const double> kept, Comparison& comparison,
                     OutputVectors* vectors, std::size_t cell) {
  for (std::size_t c = 0; c < full.size(); ++c) {
    if (vectors != nullptr) {
      vectors->full[cell * full.size() + c] = static_cast<float>(full[c]);
      vectors->errors[cell * full.size() + c] = static_cast<float>(kept[c] - full[c]);
    }
    comparison.output_full_square += full[c] * full[c];
    comparison.output_square += kept[c] * kept[c];
    comparison.output_dot += full[c] * kept[c];
    comparison.error_square += (full[c] - kept[c]) * (full[c] - kept[c]);
  }
}

/// No key moves by more than the number of those that went.
int farthest_move(KeptSets kept) {
  int farthest = 0;
  for (const KeptSet& set : kept)
    for (int row = 0; row < set.rows(); ++row) farthest = std::max(farthest, set.tokens() - set.count(row));
  return farthest;
}

}  // namespace

std::vector<Comparison> CpuBackend::compare_attention(const LayerTensors& layer, const LayerTensors& stored,
                                                      Positions positions, std::span<const std::int32_t> queries,
                                                      int boundary, KeptSets kept, OutputVectors* outputs) {
  assert(kept.size() == 1 || kept.size() == queries.size());
  const int query_count = static_cast<int>(queries.size());
  std::vector<Comparison> result(product(layer.q.heads, query_count));
  if (outputs != nullptr) {
    outputs->full.assign(result.size() * at(layer.v.dim), 0.0F);
    outputs->errors = outputs->full;
  }
  if (query_count == 0) return result;
  const bool moves = positions == Positions::cache;
  const Inputs inputs{.layer = layer,
                      .stored = stored,
                      .kept = kept,
                      .places = query_places(layer, queries, {.count = queries.back() + 1}),
                      .moves = moves,
                      .rotation = BackwardRotation(layer.rope, moves ? farthest_move(kept) : 0),
                      .boundary = boundary};
  const int dim = layer.v.dim;
  const int padded = (dim + kernels_.wide_keys - 1) / kernels_.wide_keys * kernels_.wide_keys;
  const int queries_at_once = std::max(1, rows_at_once / layer.group());
  const int blocks = (query_count + queries_at_once - 1) / queries_at_once;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads_)
  for (int kv_head = 0; kv_head < layer.k.heads; ++kv_head) {
    for (int number = 0; number < blocks; ++number) {
      if (interruption().ended()) continue;
      ThreadScratch& mine = scratch();
      const int first_query = number * queries_at_once;
      Block block(inputs, kv_head, first_query, std::min(first_query + queries_at_once, query_count));
      fill_full_logits(kernels_, mine, inputs, block);
      fill_stored_logits(kernels_, mine, inputs, block);
      std::vector<Comparison> compared = compare_weights(inputs, block);
      const std::vector<double> full = outputs_of(kernels_, mine, block, layer.v, block.full, padded);
      const std::vector<double> kept_outputs = outputs_of(kernels_, mine, block, stored.v, block.stored, padded);
      for (int row = 0; row < block.row_count(); ++row) {
        const std::size_t cell = product(block.rows[at(row)].head, query_count) + at(block.rows[at(row)].query);
        compare_outputs(std::span(full).subspan(product(row, padded), at(dim)),
                        std::span(kept_outputs).subspan(product(row, padded), at(dim)), compared[at(row)], outputs,
                        cell);
        result[cell] = compared[at(row)];
      }
    }
  }
  interruption().require_all_done();
  return result;
}

}  // namespace kvreplay
