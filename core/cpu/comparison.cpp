// The general comparison, plainly: two softmaxes written out in float64.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>

#include "attention/rope.h"
#include "attention/row_sums.h"
#include "cpu/cpu_backend.h"

namespace kvreplay {
namespace {

// Rows that read each key once.
constexpr int rows_at_once = 48;
// Keys whose values are widened at a time.
constexpr int chunk_keys = 256;

struct Row {
  int head = 0;
  int query = 0;
  int set_row = 0;
  QueryPlace place;
};

/// Logits -> weights in place; -infinity is a key that does not take part.
void softmax(std::span<double> row) {
  const double highest = *std::max_element(row.begin(), row.end());
  double sum = 0.0;
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

}  // namespace

std::vector<Comparison> CpuBackend::compare_attention(const LayerTensors& layer, const LayerTensors& stored,
                                                      Positions positions, std::span<const std::int32_t> queries,
                                                      int boundary, KeptSets kept, OutputVectors* outputs) {
  assert(kept.size() == 1 || kept.size() == queries.size());
  const int query_count = static_cast<int>(queries.size());
  const int group = layer.group();
  const auto at = [](int a, int b = 1) { return static_cast<std::size_t>(a) * static_cast<std::size_t>(b); };
  std::vector<Comparison> result(at(layer.q.heads, query_count));
  if (outputs != nullptr) {
    outputs->full.assign(result.size() * at(layer.v.dim), 0.0F);
    outputs->errors = outputs->full;
  }
  if (query_count == 0) return result;
  const std::vector<QueryPlace> places = query_places(layer, queries, {.count = queries.back() + 1});

  const bool moves = positions == Positions::cache;
  int farthest = 0;  // no key moves by more than the number of those that went
  for (const KeptSet& set : moves ? kept : KeptSets{}) {
    for (int row = 0; row < set.rows(); ++row) farthest = std::max(farthest, set.tokens() - set.count(row));
  }
  const BackwardRotation rotation(layer.rope, farthest);

  const auto set_of = [&](const Row& row) -> const KeptSet& { return kept[kept.size() == 1 ? 0 : at(row.query)]; };
  const auto resident = [&](const Row& row, int key) {
    const KeptSet& set = set_of(row);
    return key >= set.tokens() || set.keeps(row.set_row, key);
  };
  const auto holds = [&](const Row& row, int key) { return key == row.place.own || resident(row, key); };

  const double scale = static_cast<double>(layer.softmax_scale);
  const double cap = static_cast<double>(layer.logit_softcap);
  const auto logit = [&](double product) {
    const double z = scale * product;
    return cap > 0.0 ? cap * std::tanh(z / cap) : z;
  };
  const auto widen = [&](Scratch& mine, const TensorView& tensor, int head, int token, double* out) {
    float* vector = mine.staging.at_least(at(tensor.dim));
    kernels_.widen(tensor.row(head, token), tensor.dtype, tensor.dim, vector);
    std::copy_n(vector, tensor.dim, out);
  };

  // out(i, j, <row i, key j>); row_vector(i, at) and key_vector(j, at) write vectors of `dim` numbers.
  const auto for_products = [&](Scratch& mine, int rows, int keys, const auto& row_vector, const auto& key_vector,
                                const auto& out) {
    const int dim = layer.q.dim;
    const int panels = (rows + kernels_.rows - 1) / kernels_.rows;
    double* packed_rows = mine.wide_rows.at_least(at(panels * kernels_.rows, dim));
    double* vectors = mine.sums.at_least(at(std::max(kernels_.rows, kernels_.wide_keys), dim));
    double* packed_keys = mine.wide_keys.at_least(at(kernels_.wide_keys, dim));
    double* products = mine.wide_products.at_least(at(kernels_.rows, kernels_.wide_keys));
    for (int first = 0; first < rows; first += kernels_.rows) {
      const int count = std::min(kernels_.rows, rows - first);
      for (int r = 0; r < count; ++r) row_vector(first + r, vectors + at(r, dim));
      kernels_.wide_pack(vectors, count, dim, kernels_.rows, packed_rows + at(first, dim));
    }
    for (int begin = 0; begin < keys; begin += kernels_.wide_keys) {
      const int count = std::min(kernels_.wide_keys, keys - begin);
      for (int i = 0; i < count; ++i) key_vector(begin + i, vectors + at(i, dim));
      kernels_.wide_pack(vectors, count, dim, kernels_.wide_keys, packed_keys);
      for (int first = 0; first < rows; first += kernels_.rows) {
        const int some = std::min(kernels_.rows, rows - first);
        kernels_.wide_products(packed_rows + at(first, dim), packed_keys, dim, some, products);
        for (int r = 0; r < some; ++r)
          for (int i = 0; i < count; ++i) out(first + r, begin + i, products[at(r, kernels_.wide_keys) + at(i)]);
      }
    }
  };

  // sums[rows, padded_dim] += weights[rows, first_key ... end_key) * values
  const int dim = layer.v.dim;
  const int padded_dim = (dim + kernels_.wide_keys - 1) / kernels_.wide_keys * kernels_.wide_keys;
  const auto add_values = [&](Scratch& mine, const TensorView& values, int kv_head, int first_key, int end_key,
                              std::span<const double> weights, int rows, double* sums) {
    const int width = end_key - first_key;
    double* packed_weights = mine.wide_rows.at_least(at(kernels_.rows, chunk_keys));
    double* vector = mine.sums.at_least(at(padded_dim));
    double* packed_values = mine.wide_keys.at_least(at(chunk_keys, padded_dim));
    double* products = mine.wide_products.at_least(at(kernels_.rows, kernels_.wide_keys));
    std::fill_n(vector, padded_dim, 0.0);
    for (int begin = 0; begin < width; begin += chunk_keys) {
      const int count = std::min(chunk_keys, width - begin);
      // [padded_dim / wide_keys, chunk_keys, wide_keys]
      for (int i = 0; i < count; ++i) {
        widen(mine, values, kv_head, first_key + begin + i, vector);
        for (int c = 0; c < padded_dim; c += kernels_.wide_keys)
          std::copy_n(vector + c, kernels_.wide_keys, packed_values + at(c, chunk_keys) + at(i, kernels_.wide_keys));
      }
      for (int first = 0; first < rows; first += kernels_.rows) {
        const int some = std::min(kernels_.rows, rows - first);
        for (int i = 0; i < count; ++i)
          for (int r = 0; r < kernels_.rows; ++r)
            packed_weights[at(i, kernels_.rows) + at(r)] =
                r < some ? weights[at(first + r, width) + at(begin + i)] : 0.0;
        for (int c = 0; c < padded_dim; c += kernels_.wide_keys) {
          kernels_.wide_products(packed_weights, packed_values + at(c, chunk_keys), count, some, products);
          for (int r = 0; r < some; ++r)
            for (int i = 0; i < kernels_.wide_keys; ++i)
              sums[at(first + r, padded_dim) + at(c + i)] += products[at(r, kernels_.wide_keys) + at(i)];
        }
      }
    }
  };

  const auto compare_block = [&](Scratch& mine, int kv_head, int first_query, int end_query) {
    std::vector<Row> rows;
    int first_key = queries.back();
    int end_key = 0;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int query = first_query; query < end_query; ++query) {
        const QueryPlace& place = places[at(query)];
        rows.push_back({head, query, kept.front().row_of(head, group), place});
        first_key = std::min(first_key, place.first);
        end_key = std::max(end_key, place.end);
      }
    }
    const int width = end_key - first_key;
    const int row_count = static_cast<int>(rows.size());
    std::vector<double> full(at(row_count, width), -HUGE_VAL);
    std::vector<double> partial = full;  // of the stored keys
    const auto column = [&](int row, int key) { return at(row, width) + at(key - first_key); };
    const auto sees = [&](int row, int key) {
      return key >= rows[at(row)].place.first && key < rows[at(row)].place.end;
    };

    for_products(
        mine, row_count, width,
        [&](int row, double* out) { widen(mine, layer.q, rows[at(row)].head, rows[at(row)].place.stored, out); },
        [&](int key, double* out) { widen(mine, layer.k, kv_head, first_key + key, out); },
        [&](int row, int key, double product) {
          if (sees(row, first_key + key)) full[column(row, first_key + key)] = logit(product);
        });

    // Rows that read the same keys at the same places: all, unless keys move as a set says.
    std::vector<std::vector<int>> groups;
    for (int row = 0; row < row_count; ++row) {
      const auto same = std::ranges::find_if(groups, [&](const std::vector<int>& some) {
        const Row& other = rows[at(some.front())];
        return !moves || (&set_of(other) == &set_of(rows[at(row)]) && other.set_row == rows[at(row)].set_row);
      });
      if (same == groups.end()) {
        groups.push_back({row});
      } else {
        same->push_back(row);
      }
    }
    struct PlacedKey {
      int key = 0;
      int moved = 0;
    };
    std::vector<PlacedKey> keys;
    std::vector<int> slots(at(end_key));  // resident keys before each, for rows that move
    for (const std::vector<int>& members : groups) {
      const Row& one = rows[at(members.front())];
      if (moves) {
        int slot = 0;
        for (int key = 0; key < end_key; ++key) {
          slots[at(key)] = slot;
          if (resident(one, key)) ++slot;
        }
      }
      const auto moved = [&](int key) { return moves ? slots[at(key)] - key : 0; };
      keys.clear();
      for (int key = first_key; key < end_key; ++key) {
        if (std::ranges::any_of(members, [&](int row) { return holds(rows[at(row)], key); }))
          keys.push_back({key, moved(key)});
      }
      const auto width_of = [](const TensorView& tensor) { return static_cast<std::size_t>(tensor.dim); };
      for_products(
          mine, static_cast<int>(members.size()), static_cast<int>(keys.size()),
          [&](int member, double* out) {
            const Row& row = rows[at(members[at(member)])];
            widen(mine, layer.q, row.head, row.place.stored, out);
            rotation.apply(moved(row.place.own), {out, width_of(layer.q)});
          },
          [&](int number, double* out) {
            widen(mine, stored.k, kv_head, keys[at(number)].key, out);
            rotation.apply(keys[at(number)].moved, {out, width_of(stored.k)});
          },
          [&](int member, int number, double product) {
            const int row = members[at(member)];
            const int key = keys[at(number)].key;
            if (sees(row, key) && holds(rows[at(row)], key)) partial[column(row, key)] = logit(product);
          });
    }

    std::vector<Comparison> compared(rows.size());
    for (int row = 0; row < row_count; ++row) {
      const QueryPlace& place = rows[at(row)].place;
      const auto some = at(place.end - place.first);
      const std::span<double> a = std::span(full).subspan(column(row, place.first), some);
      const std::span<double> kept_a = std::span(partial).subspan(column(row, place.first), some);
      Comparison& comparison = compared[at(row)];
      for (int key = place.first; key < std::min(boundary, place.end); ++key) {
        const auto i = at(key - place.first);
        add(comparison.logits, a[i], kept_a[i] == -HUGE_VAL ? 0.0 : kept_a[i]);
      }
      softmax(std::span(full).subspan(at(row, width), at(width)));
      softmax(std::span(partial).subspan(at(row, width), at(width)));
      for (int key = place.first; key < place.end; ++key) {
        const auto i = at(key - place.first);
        add(comparison.all, a[i], kept_a[i]);
        if (key < boundary) add(comparison.prompt, a[i], kept_a[i]);
        if (key < boundary && key >= sink_tokens) add(comparison.nosink, a[i], kept_a[i]);
        comparison.l1 += std::abs(a[i] - kept_a[i]);
        if (holds(rows[at(row)], key)) comparison.mass += a[i];
      }
    }

    std::vector<double> full_outputs(at(row_count, padded_dim));
    std::vector<double> kept_outputs = full_outputs;
    add_values(mine, layer.v, kv_head, first_key, end_key, full, row_count, full_outputs.data());
    add_values(mine, stored.v, kv_head, first_key, end_key, partial, row_count, kept_outputs.data());
    for (int row = 0; row < row_count; ++row) {
      Comparison& comparison = compared[at(row)];
      const std::size_t cell = at(rows[at(row)].head, query_count) + at(rows[at(row)].query);
      for (int c = 0; c < dim; ++c) {
        const double o = full_outputs[at(row, padded_dim) + at(c)];
        const double kept_o = kept_outputs[at(row, padded_dim) + at(c)];
        if (outputs != nullptr) {
          outputs->full[cell * at(dim) + at(c)] = static_cast<float>(o);
          outputs->errors[cell * at(dim) + at(c)] = static_cast<float>(kept_o - o);
        }
        comparison.output_full_square += o * o;
        comparison.output_square += kept_o * kept_o;
        comparison.output_dot += o * kept_o;
        comparison.error_square += (o - kept_o) * (o - kept_o);
      }
      result[cell] = comparison;
    }
  };

  const int queries_at_once = std::max(1, rows_at_once / group);
  const int blocks = (query_count + queries_at_once - 1) / queries_at_once;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads_)
  for (int kv_head = 0; kv_head < layer.k.heads; ++kv_head) {
    for (int block = 0; block < blocks; ++block) {
      compare_block(scratch(), kv_head, block * queries_at_once, std::min((block + 1) * queries_at_once, query_count));
    }
  }
  return result;
}

}  // namespace kvreplay
