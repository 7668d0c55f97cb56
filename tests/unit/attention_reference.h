// Random layers, and what the backend computes written once more, naively and in float64.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <ostream>
#include <vector>

#include "attention/backend.h"
#include "error.h"
#include "random.h"
#include "tests/tested_backend.h"

namespace kvreplay::testing {

struct LayerShape {
  int query_heads = 4;
  int kv_heads = 2;
  int tokens = 33;
  int dim = 8;
  DType dtype = DType::float32;
  double spread = 1.0;  // of the numbers in q and k
  int sliding_window = 0;
  float softcap = 0.0F;
  int first_stored_query = -1;  // -1: all are stored
  int stored_query_step = 1;
  int rope_pairs = 0;
  bool interleaved = false;
  int rope_offset = 0;
  int chunk = 0;
  int value_components = 0;  // above 0: values are so many first components of the keys
  bool sink_logits = false;  // of all query heads but every third
  std::uint64_t seed = 1;

  int value_dim() const { return value_components > 0 ? value_components : dim; }
};

/// The name of a test of it: googletest would print its bytes.
inline void PrintTo(const LayerShape& shape, std::ostream* out) {
  *out << shape.query_heads << "/" << shape.kv_heads << " heads, " << shape.tokens << " tokens, d " << shape.dim << ", "
       << name_of(shape.dtype);
}

inline std::uint16_t to_float16(float value) {
  // No subnormal ones, truncated: test data need no rounding, but must be exactly what both sides read.
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const int exponent = static_cast<int>(bits >> 23 & 0xFFu) - 127 + 15;
  if (exponent <= 0) return static_cast<std::uint16_t>(sign);
  if (exponent > 30) return static_cast<std::uint16_t>(sign | 0x7C00u | (bits >> 13 & 0x3FFu));
  return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(exponent) << 10 | (bits >> 13 & 0x3FFu));
}

inline float from_float16(std::uint16_t half) {
  const int exponent = half >> 10 & 0x1F;
  const double fraction = static_cast<double>(half & 0x3FF) / 1024.0;
  const double size = exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1.0 + fraction, exponent - 15);
  return static_cast<float>((half & 0x8000) != 0 ? -size : size);
}

/// A tensor in its stored type, and the numbers that it holds.
class RandomTensor {
 public:
  RandomTensor(int heads, int tokens, int dim, DType dtype, double spread, std::uint64_t seed)
      : heads_(heads), tokens_(tokens), dim_(dim), dtype_(dtype) {
    const auto count =
        static_cast<std::size_t>(heads) * static_cast<std::size_t>(tokens) * static_cast<std::size_t>(dim);
    bytes_.resize(count * size_of(dtype));
    for (std::size_t i = 0; i < count; ++i)
      set(i, static_cast<float>(spread * gaussian(chain(seed, i, 0), chain(seed, i, 1))));
  }

  void set(int head, int token, int c, float value) { set(index(head, token, c), value); }
  double at(int head, int token, int c) const {
    const std::size_t i = index(head, token, c);
    if (dtype_ == DType::float32) {
      float value;
      std::memcpy(&value, bytes_.data() + 4 * i, 4);
      return static_cast<double>(value);
    }
    std::uint16_t half;
    std::memcpy(&half, bytes_.data() + 2 * i, 2);
    if (dtype_ == DType::float16) return static_cast<double>(from_float16(half));
    return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16));
  }
  std::vector<double> row(int head, int token) const {
    std::vector<double> numbers;
    for (int c = 0; c < dim_; ++c) numbers.push_back(at(head, token, c));
    return numbers;
  }
  TensorView view() const { return {bytes_.data(), dtype_, heads_, tokens_, dim_}; }

 private:
  std::size_t index(int head, int token, int c) const {
    return (static_cast<std::size_t>(head) * static_cast<std::size_t>(tokens_) + static_cast<std::size_t>(token)) *
               static_cast<std::size_t>(dim_) +
           static_cast<std::size_t>(c);
  }
  void set(std::size_t i, float value) {
    if (dtype_ == DType::float32) {
      std::memcpy(bytes_.data() + 4 * i, &value, 4);
      return;
    }
    const std::uint16_t half = dtype_ == DType::float16
                                   ? to_float16(value)
                                   : static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
    std::memcpy(bytes_.data() + 2 * i, &half, 2);
  }

  int heads_, tokens_, dim_;
  DType dtype_;
  std::vector<std::byte> bytes_;
};

/// What a token holds in all heads, one after another.
inline std::vector<double> token_vector(const RandomTensor& tensor, int heads, int token) {
  std::vector<double> all;
  for (int head = 0; head < heads; ++head) {
    const std::vector<double> row = tensor.row(head, token);
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}

inline std::vector<std::int32_t> range(int begin, int end, int step = 1) {
  std::vector<std::int32_t> positions;
  for (int position = begin; position < end; position += step) positions.push_back(position);
  return positions;
}

class RandomLayer {
 public:
  explicit RandomLayer(const LayerShape& shape)
      : shape_(shape),
        stored_queries_(shape.first_stored_query < 0
                            ? std::vector<std::int32_t>{}
                            : range(shape.first_stored_query, shape.tokens, shape.stored_query_step)),
        q(shape.query_heads, stored_queries_.empty() ? shape.tokens : static_cast<int>(stored_queries_.size()),
          shape.dim, shape.dtype, shape.spread, chain(shape.seed, 1)),
        k(shape.kv_heads, shape.tokens, shape.dim, shape.dtype, shape.spread, chain(shape.seed, 2)),
        v(shape.kv_heads, shape.tokens, shape.value_dim(), shape.dtype, 1.0, chain(shape.seed, 3)) {
    for (int i = 0; i < shape.rope_pairs; ++i) inv_freq_.push_back(std::pow(10.0, -0.5 * i));
    for (int head = 0; shape.sink_logits && head < shape.query_heads; ++head)
      sinks_.push_back(head % 3 == 2 ? -HUGE_VAL
                                     : 3.0 * gaussian(chain(shape.seed, 4, head), chain(shape.seed, 5, head)));
    for (int head = 0; shape.value_components > 0 && head < shape.kv_heads; ++head)
      for (int token = 0; token < shape.tokens; ++token)
        for (int c = 0; c < shape.value_components; ++c)
          v.set(head, token, c, static_cast<float>(k.at(head, token, c)));
  }

  LayerTensors tensors() const {
    LayerTensors tensors;
    tensors.q = q.view();
    tensors.k = k.view();
    tensors.v = v.view();
    if (shape_.value_components > 0) {
      tensors.value_is_key = true;
      tensors.v = k.view();
      tensors.v.stride = shape_.dim;
      tensors.v.dim = shape_.value_components;
    }
    tensors.query_positions = stored_queries_;
    tensors.softmax_scale = 1.0F / std::sqrt(static_cast<float>(shape_.dim));
    tensors.logit_softcap = shape_.softcap;
    tensors.sliding_window = shape_.sliding_window;
    tensors.chunk = shape_.chunk;
    tensors.sinks = sinks_;
    tensors.rope = {inv_freq_, 1.0, shape_.interleaved, shape_.rope_offset};
    return tensors;
  }
  const LayerShape& shape() const { return shape_; }
  int group() const { return shape_.query_heads / shape_.kv_heads; }

  std::vector<double> query(int head, int position) const {
    const auto& stored = stored_queries_;
    if (stored.empty()) return q.row(head, position);
    return q.row(head, static_cast<int>(std::find(stored.begin(), stored.end(), position) - stored.begin()));
  }

  /// rot(x, distance) over the stored pairs, as complex numbers.
  std::vector<double> rotated(std::vector<double> x, int distance) const {
    const std::size_t pairs = inv_freq_.size();
    const auto offset = static_cast<std::size_t>(shape_.rope_offset);
    for (std::size_t i = 0; i < pairs; ++i) {
      const std::size_t first = offset + (shape_.interleaved ? 2 * i : i);
      const std::size_t second = first + (shape_.interleaved ? 1 : pairs);
      const double size = std::hypot(x[first], x[second]);
      const double angle = std::atan2(x[second], x[first]) + distance * inv_freq_[i];
      x[first] = size * std::cos(angle);
      x[second] = size * std::sin(angle);
    }
    return x;
  }

  double logit(const std::vector<double>& query, const std::vector<double>& key) const {
    const double z = static_cast<double>(1.0F / std::sqrt(static_cast<float>(shape_.dim))) *
                     std::inner_product(query.begin(), query.end(), key.begin(), 0.0);
    return shape_.softcap > 0.0F
               ? static_cast<double>(shape_.softcap) * std::tanh(z / static_cast<double>(shape_.softcap))
               : z;
  }

  bool visible(int query, int key) const {
    return key <= query && (shape_.sliding_window == 0 || key > query - shape_.sliding_window) &&
           (shape_.chunk == 0 || key / shape_.chunk == query / shape_.chunk);
  }
  double sink(int query_head) const {
    return sinks_.empty() ? -HUGE_VAL : sinks_[static_cast<std::size_t>(query_head)];
  }

  /// Logits of query `position` over all tokens, -infinity where not visible.
  std::vector<double> logits(int head, int position) const {
    std::vector<double> z(static_cast<std::size_t>(shape_.tokens), -HUGE_VAL);
    const std::vector<double> vector = query(head, position);
    for (int key = 0; key < shape_.tokens; ++key) {
      if (visible(position, key)) z[static_cast<std::size_t>(key)] = logit(vector, k.row(head / group(), key));
    }
    return z;
  }

 private:
  LayerShape shape_;
  std::vector<std::int32_t> stored_queries_;

 public:
  RandomTensor q, k, v;

 private:
  std::vector<double> inv_freq_;
  std::vector<double> sinks_;
};

inline std::vector<double> softmax(std::vector<double> z, double sink = -HUGE_VAL) {
  const double highest = std::max(sink, *std::max_element(z.begin(), z.end()));
  if (highest == -HUGE_VAL) return std::vector<double>(z.size(), 0.0);
  double sum = std::exp(sink - highest);
  for (double& x : z) sum += x = std::exp(x - highest);
  for (double& x : z) x /= sum;
  return z;
}

inline Matrix reference_sums(const RandomLayer& layer, const AttentionSums& what) {
  const auto& shape = layer.shape();
  const int columns =
      what.resident.empty() ? what.columns : static_cast<int>(what.resident.size()) / what.resident_rows;
  Matrix sums(shape.query_heads, columns);
  for (int head = 0; head < shape.query_heads; ++head) {
    const int row = what.resident_rows > 1 ? head / layer.group() : 0;
    for (std::size_t i = 0; i < what.queries.size(); ++i) {
      const int t = what.queries[i];
      const double weight = what.weights.empty() ? 1.0 : what.weights[i];
      std::vector<int> keys;
      if (what.resident.empty()) {
        for (int key = 0; key < shape.tokens; ++key) keys.push_back(key);
      } else {
        for (int slot = 0; slot < columns; ++slot)
          keys.push_back(what.resident[static_cast<std::size_t>(row * columns + slot)]);
      }
      const bool moves = what.positions == Positions::cache;
      std::vector<double> query = layer.query(head, t);
      if (moves)
        query = layer.rotated(query, static_cast<int>(std::find(keys.begin(), keys.end(), t) - keys.begin()) - t);
      std::vector<double> z;
      for (std::size_t slot = 0; slot < keys.size(); ++slot) {
        std::vector<double> key = layer.k.row(head / layer.group(), keys[slot]);
        if (moves) key = layer.rotated(key, static_cast<int>(slot) - keys[slot]);
        z.push_back(layer.visible(t, keys[slot]) ? layer.logit(query, key) : -HUGE_VAL);
      }
      const std::vector<double> a = softmax(z, layer.sink(head));
      const auto seen = static_cast<double>(std::count_if(z.begin(), z.end(), [](double x) { return x > -HUGE_VAL; }));
      for (std::size_t slot = 0; slot < keys.size() && slot < static_cast<std::size_t>(columns); ++slot) {
        if (!what.own_key && keys[slot] == t) continue;
        const bool counts = what.above_uniform > 0.0;
        sums(head, static_cast<int>(slot)) += !counts ? weight * a[slot] : a[slot] > what.above_uniform / seen ? 1 : 0;
      }
    }
  }
  return sums;
}

/// Moments of one head and query; `set` null: everything.
inline Moments reference_moments(const RandomLayer& layer, int head, int t, int boundary, const KeptSet* set) {
  const auto& shape = layer.shape();
  const std::vector<double> z = layer.logits(head, t);
  const std::vector<double> a = softmax(z, layer.sink(head));
  const auto holds = [&](int key) {
    return layer.visible(t, key) &&
           (set == nullptr || key == t || key >= set->tokens() || set->keeps(set->row_of(head, layer.group()), key));
  };
  std::vector<double> kept_logits = z;
  for (int key = 0; key < shape.tokens; ++key)
    if (!holds(key)) kept_logits[static_cast<std::size_t>(key)] = -HUGE_VAL;
  const std::vector<double> kept = softmax(kept_logits, layer.sink(head));
  Moments moments;
  std::size_t rank = 0;
  std::vector<double> full_output(static_cast<std::size_t>(shape.value_dim())), output(full_output);
  for (int key = 0; key < shape.tokens; ++key) {
    const auto at = static_cast<std::size_t>(key);
    for (int c = 0; c < shape.value_dim(); ++c) {
      full_output[static_cast<std::size_t>(c)] += a[at] * layer.v.at(head / layer.group(), key, c);
      output[static_cast<std::size_t>(c)] += kept[at] * layer.v.at(head / layer.group(), key, c);
    }
    if (!holds(key)) continue;
    moments.mass += a[at];
    moments.square += a[at] * a[at];
    if (key >= boundary) continue;
    moments.prompt_mass += a[at];
    moments.prompt_square += a[at] * a[at];
    moments.logit_square += z[at] * z[at];
    moments.unaligned_dot += a[at] * a[rank++];
    if (key < sink_tokens) continue;
    moments.nosink_mass += a[at];
    moments.nosink_square += a[at] * a[at];
  }
  for (std::size_t c = 0; c < output.size(); ++c) {
    moments.output_square += output[c] * output[c];
    moments.output_dot += output[c] * full_output[c];
    moments.error_square += (output[c] - full_output[c]) * (output[c] - full_output[c]);
  }
  return moments;
}

/// The general comparison of one head and query; `positions` says where kept tokens stand, `weights` [tokens] are those
/// in the attention over them, 1 if empty.
inline Comparison reference_comparison(const RandomLayer& layer, const RandomLayer& stored, Positions positions,
                                       int head, int t, int boundary, const KeptSet& set,
                                       std::span<const double> weights = {}) {
  const auto& shape = layer.shape();
  const int kv_head = head / layer.group();
  const std::vector<double> full_logits = layer.logits(head, t);
  const std::vector<double> a = softmax(full_logits, layer.sink(head));
  std::vector<int> resident;
  for (int key = 0; key <= t; ++key)
    if (key == t || key >= set.tokens() || set.keeps(set.row_of(head, layer.group()), key)) resident.push_back(key);
  const bool moves = positions == Positions::cache;
  const std::vector<double> query =
      layer.rotated(layer.query(head, t), moves ? static_cast<int>(resident.size()) - 1 - t : 0);
  std::vector<double> z(static_cast<std::size_t>(shape.tokens), -HUGE_VAL);
  for (std::size_t slot = 0; slot < resident.size(); ++slot) {
    if (!layer.visible(t, resident[slot])) continue;
    const std::vector<double> key =
        layer.rotated(stored.k.row(kv_head, resident[slot]), moves ? static_cast<int>(slot) - resident[slot] : 0);
    z[static_cast<std::size_t>(resident[slot])] = layer.logit(query, key);
  }
  std::vector<double> weighted = z;
  for (std::size_t key = 0; key < weights.size(); ++key) weighted[key] += std::log(weights[key]);
  const std::vector<double> kept = softmax(weighted, layer.sink(head));
  const auto align = [](Alignment& alignment, double full, double other) {
    alignment.dot += full * other;
    alignment.full_square += full * full;
    alignment.stored_square += other * other;
  };
  Comparison expected;
  expected.full_mass = std::accumulate(a.begin(), a.end(), 0.0);
  for (int key = 0; key < shape.tokens; ++key) {
    const auto at = static_cast<std::size_t>(key);
    align(expected.all, a[at], kept[at]);
    expected.l1 += std::abs(a[at] - kept[at]);
    if (z[at] > -HUGE_VAL) expected.mass += a[at];
    if (key >= boundary) continue;
    align(expected.prompt, a[at], kept[at]);
    if (key >= sink_tokens) align(expected.nosink, a[at], kept[at]);
    if (layer.visible(t, key)) align(expected.logits, full_logits[at], z[at] > -HUGE_VAL ? z[at] : 0.0);
  }
  for (int c = 0; c < shape.value_dim(); ++c) {
    double full_output = 0.0, output = 0.0;
    for (int key = 0; key < shape.tokens; ++key) {
      full_output += a[static_cast<std::size_t>(key)] * layer.v.at(kv_head, key, c);
      output += kept[static_cast<std::size_t>(key)] * stored.v.at(kv_head, key, c);
    }
    expected.output_full_square += full_output * full_output;
    expected.output_square += output * output;
    expected.output_dot += full_output * output;
    expected.error_square += (full_output - output) * (full_output - output);
  }
  return expected;
}

/// Budgets that grow with the tokens, and their recent part: one in `every` tokens joins `begin`.
struct GrowingBudget {
  std::vector<std::int32_t> budgets, recents;

  GrowingBudget(int tokens, int begin, int every) {
    for (int t = 0; t < tokens; ++t) {
      budgets.push_back(begin + t / every);
      recents.push_back(std::max(1, budgets.back() / 3));
    }
  }
  OnlineEviction of(OnlineEviction what) const {
    what.budget = budgets.back();
    what.recent = recents.back();
    what.budgets = budgets;
    what.recents = recents;
    return what;
  }
};

/// The greedy algorithm, a list of residents copied and searched at every token.
inline std::vector<std::int32_t> reference_eviction(const RandomLayer& layer, const OnlineEviction& what) {
  const auto& shape = layer.shape();
  const int rows = rows_of(what.heads, shape.query_heads, shape.kv_heads);
  const int given = static_cast<int>(what.resident.size()) / rows;
  std::vector<std::int32_t> evicted(static_cast<std::size_t>(rows * what.tokens), -1);
  for (int row = 0; row < rows; ++row) {
    struct Token {
      int position;
      double score;
    };
    std::vector<Token> held;
    for (int i = 0; i < given; ++i) {
      const auto number = static_cast<std::size_t>(row * given + i);
      held.push_back({what.resident[number], what.scores[number]});
    }
    std::vector<int> heads;
    for (int head = 0; head < shape.query_heads; ++head) {
      if (what.heads == Heads::layer || row == (what.heads == Heads::query ? head : head / layer.group()))
        heads.push_back(head);
    }
    for (int t = what.first; t < what.tokens; ++t) {
      held.push_back({t, 0.0});
      std::vector<double> mean(held.size());
      for (const int head : heads) {
        const std::vector<double> query = layer.query(head, t);
        std::vector<double> z;
        for (const Token& token : held) {
          z.push_back(layer.visible(t, token.position)
                          ? layer.logit(query, layer.k.row(head / layer.group(), token.position))
                          : -HUGE_VAL);
        }
        const std::vector<double> a = softmax(z, layer.sink(head));
        for (std::size_t i = 0; i < a.size(); ++i) mean[i] += a[i] / static_cast<double>(heads.size());
      }
      for (std::size_t i = 0; i < held.size(); ++i) held[i].score = what.accumulate ? held[i].score + mean[i] : mean[i];
      const int budget = what.budgets.empty() ? what.budget : what.budgets[static_cast<std::size_t>(t)];
      const int recent = what.recents.empty() ? what.recent : what.recents[static_cast<std::size_t>(t)];
      while (static_cast<int>(held.size()) > budget) {
        // A sink that comes before all sinks have come goes where there is no room for it.
        std::size_t lowest = 0;
        while (lowest + 1 < held.size() && held[lowest].position < std::min(what.sinks, t)) ++lowest;
        for (std::size_t i = lowest; i + static_cast<std::size_t>(recent) < held.size(); ++i)
          if (held[i].score <= held[lowest].score) lowest = i;
        evicted[static_cast<std::size_t>(row * what.tokens + held[lowest].position)] = t;
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(lowest));
      }
    }
  }
  return evicted;
}

/// rint(2^30 cos) of all pairs of vectors.
inline std::vector<std::vector<std::int64_t>> reference_similarities(const std::vector<std::vector<double>>& vectors) {
  const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  };
  std::vector<double> norms;
  for (const auto& vector : vectors) norms.push_back(std::sqrt(dot(vector, vector)));
  std::vector<std::vector<std::int64_t>> all;
  for (std::size_t i = 0; i < vectors.size(); ++i) {
    all.emplace_back();
    for (std::size_t j = 0; j < vectors.size(); ++j) {
      const double size = norms[i] * norms[j];
      all.back().push_back(size > 0.0 ? std::llrint(std::ldexp(dot(vectors[i], vectors[j]) / size, 30)) : 0);
    }
  }
  return all;
}

/// Add of every token taken anew at every step.
inline std::vector<std::int32_t> reference_least_redundant(
    const std::vector<std::vector<std::vector<std::int64_t>>>& similarities, const RedundancyElimination& what) {
  const int tokens = static_cast<int>(similarities.front().size());
  std::vector<std::int32_t> members = range(0, what.sinks);
  for (const int token : range(tokens - what.recent, tokens)) members.push_back(token);
  while (static_cast<int>(members.size()) < what.keep) {
    std::vector<std::int64_t> sums(static_cast<std::size_t>(tokens));
    for (const auto& all : similarities) {
      const auto similarity = [&](int i, int j) {
        return all[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)];
      };
      std::vector<std::int64_t> red;
      for (const int i : members) {
        std::int64_t highest = members.size() == 1 ? 0 : INT64_MIN;
        for (const int k : members)
          if (k != i) highest = std::max(highest, similarity(i, k));
        red.push_back(highest);
      }
      for (int j = 0; j < tokens; ++j) {
        std::int64_t highest = INT64_MIN;
        for (std::size_t i = 0; i < members.size(); ++i) {
          sums[static_cast<std::size_t>(j)] += std::max<std::int64_t>(0, similarity(members[i], j) - red[i]);
          highest = std::max(highest, similarity(members[i], j));
        }
        sums[static_cast<std::size_t>(j)] += highest;
      }
    }
    int best = -1;
    for (int j = 0; j < tokens; ++j) {
      if (std::find(members.begin(), members.end(), j) != members.end()) continue;
      if (best < 0 || (what.most_redundant ? sums[static_cast<std::size_t>(j)] > sums[static_cast<std::size_t>(best)]
                                           : sums[static_cast<std::size_t>(j)] < sums[static_cast<std::size_t>(best)]))
        best = j;
    }
    members.push_back(best);
  }
  std::sort(members.begin(), members.end());
  return members;
}

/// check(level) under every level that the tested backend has on this machine; how many they are.
template <class Check>
int at_every_simd_level(Check check) {
  const std::vector<std::string> levels = tested_levels();
  for (const std::string& level : levels) {
    const ForcedLevel forced(level);
    choose_simd_level();
    check(level.c_str());
  }
  return static_cast<int>(levels.size());
}

/// About `share` of the positions, at random.
inline KeptSet random_set(Heads heads, const LayerShape& shape, int tokens, double share, std::uint64_t seed) {
  KeptSet set(heads, rows_of(heads, shape.query_heads, shape.kv_heads), tokens);
  for (int row = 0; row < set.rows(); ++row)
    for (int position = 0; position < tokens; ++position)
      if (uniform(chain(seed, row, position)) < share) set.keep(row, position);
  return set;
}

/// Queries of a layer whose attention is measured.
struct EvalCase {
  LayerShape shape;
  int boundary = 0;
  std::vector<std::int32_t> queries;
};

inline void PrintTo(const EvalCase& some, std::ostream* out) {
  PrintTo(some.shape, out);
  *out << ", boundary " << some.boundary << ", " << some.queries.size() << " queries";
}

/// One set a query, which cover a little more than the boundary asks for.
inline std::vector<KeptSet> one_a_query(Heads heads, const EvalCase& some, double share, std::uint64_t seed) {
  std::vector<KeptSet> sets;
  for (std::size_t query = 0; query < some.queries.size(); ++query) {
    const int beyond = std::max(0, some.shape.tokens - some.boundary) * static_cast<int>(query % 4) / 3;
    sets.push_back(random_set(heads, some.shape, some.boundary + beyond, share, chain(seed, query)));
  }
  return sets;
}

}  // namespace kvreplay::testing
