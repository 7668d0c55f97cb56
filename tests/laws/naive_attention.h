// What one query loses by what is kept, computed once more in float64 from the trace alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "float_types.h"
#include "recorded_run.h"

namespace kvreplay {

/// [tokens, dim] of one head.
using HeadRows = std::vector<std::vector<double>>;

inline HeadRows head_rows(const TensorView& tensor, int head) {
  HeadRows rows(static_cast<std::size_t>(tensor.tokens));
  for (int t = 0; t < tensor.tokens; ++t)
    for (int c = 0; c < tensor.dim; ++c)
      rows[static_cast<std::size_t>(t)].push_back(
          static_cast<double>(load(tensor.row(head, t), tensor.dtype, static_cast<std::size_t>(c))));
  return rows;
}

inline HeadRows head_rows(const std::vector<float>& numbers, const TensorView& shape, int head) {
  HeadRows rows(static_cast<std::size_t>(shape.tokens));
  const std::size_t dim = static_cast<std::size_t>(shape.dim);
  for (std::size_t t = 0; t < rows.size(); ++t)
    for (std::size_t c = 0; c < dim; ++c)
      rows[t].push_back(static_cast<double>(numbers[(static_cast<std::size_t>(head) * rows.size() + t) * dim + c]));
  return rows;
}

inline std::vector<double> turned(const Rope& rope, int distance, std::vector<double> x) {
  const std::size_t pairs = rope.inv_freq.size();
  for (std::size_t i = 0; i < pairs; ++i) {
    const double cosine = std::cos(distance * rope.inv_freq[i]), sine = std::sin(distance * rope.inv_freq[i]);
    double& a = rope.interleaved ? x[2 * i] : x[i];
    double& b = rope.interleaved ? x[2 * i + 1] : x[i + pairs];
    const double before = a;
    a = before * cosine - b * sine;
    b = before * sine + b * cosine;
  }
  return x;
}

struct Naive {
  double mass = 0;   // attention on what is kept
  double l1 = 0;     // |a - a~|_1
  double error = 0;  // |o - o~|_2
};

/// Positions that query t of query head h sees, in the order of their slots; t is the last one.
inline std::vector<int> seen_in_slot_order(const LayerSelection& selection, const LayerTensors& tensors, int h, int t) {
  const int row = selection.set.row_of(h, tensors.group());
  std::vector<int> seen;
  if (!selection.slots.empty()) {
    std::size_t begin = 0;
    for (int r = 0; r < row; ++r) begin += static_cast<std::size_t>(selection.set.count(r));
    for (int i = 0; i < selection.set.count(row); ++i)
      seen.push_back(selection.slots[begin + static_cast<std::size_t>(i)]);
    for (int j = selection.set.tokens(); j <= t; ++j) seen.push_back(j);
    return seen;
  }
  const KeptSet set = selection.differs_by_query() ? selection.seen_by(t) : selection.set;
  const int of_head = set.row_of(h, tensors.group());
  for (int j = 0; j <= t; ++j)
    if (j >= set.tokens() || set.keeps(of_head, j) || j == t) seen.push_back(j);
  return seen;
}

/// `log_weights` [logits] are added to the capped logits; empty: 0.
inline std::vector<double> softmax(std::vector<double> logits, float softcap, double sink,
                                   const std::vector<double>& log_weights = {}) {
  if (softcap > 0)
    for (double& z : logits) z = static_cast<double>(softcap) * std::tanh(z / static_cast<double>(softcap));
  for (std::size_t i = 0; i < log_weights.size(); ++i) logits[i] += log_weights[i];
  const double highest = std::max(sink, *std::ranges::max_element(logits));
  double sum = std::exp(sink - highest);
  for (double& z : logits) {
    z = std::exp(z - highest);
    sum += z;
  }
  for (double& z : logits) z /= sum;
  return logits;
}

inline double product(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t c = 0; c < a.size(); ++c) sum += a[c] * b[c];
  return sum;
}

/// One layer in float64. `stored` holds other keys and values where the store changes them.
class NaiveLayer {
 public:
  NaiveLayer(const LayerTensors& tensors, const StoredNumbers* stored) : tensors_(tensors) {
    for (int h = 0; h < tensors.q.heads; ++h) queries_.push_back(head_rows(tensors.q, h));
    for (int h = 0; h < tensors.k.heads; ++h) {
      keys_.push_back(head_rows(tensors.k, h));
      values_.push_back(head_rows(tensors.v, h));
      stored_keys_.push_back(stored != nullptr ? head_rows(stored->keys, tensors.k, h) : keys_.back());
      stored_values_.push_back(stored != nullptr ? head_rows(stored->values, tensors.v, h) : values_.back());
    }
  }

  /// Of query head h at query t, which sees `seen`, in the order of their slots, with `weights` if there are any.
  Naive lost(int h, int t, const std::vector<int>& seen, Positions positions, const LogWeights& weights = {}) const {
    const auto kv = static_cast<std::size_t>(h / tensors_.group());
    const std::vector<double>& query = queries_[static_cast<std::size_t>(h)][static_cast<std::size_t>(t)];
    const double scale = static_cast<double>(tensors_.softmax_scale);
    std::vector<double> logits, kept_logits, log_weights(static_cast<std::size_t>(t) + 1), kept_log_weights;
    if (weights) weights(h, t, 0, log_weights);
    for (std::size_t j = 0; j <= static_cast<std::size_t>(t); ++j)
      logits.push_back(scale * product(query, keys_[kv][j]));
    const std::vector<double> full = softmax(logits, tensors_.logit_softcap, tensors_.sink(h));
    const bool moves = positions == Positions::cache;
    const auto own_slot = static_cast<int>(seen.size()) - 1;
    const std::vector<double> moved_query = moves ? turned(tensors_.rope, own_slot - t, query) : query;
    for (int slot = 0; slot <= own_slot; ++slot) {
      const int j = seen[static_cast<std::size_t>(slot)];
      const std::vector<double>& key = stored_keys_[kv][static_cast<std::size_t>(j)];
      kept_logits.push_back(scale * product(moved_query, moves ? turned(tensors_.rope, slot - j, key) : key));
      kept_log_weights.push_back(log_weights[static_cast<std::size_t>(j)]);
    }
    const std::vector<double> over_kept =
        softmax(kept_logits, tensors_.logit_softcap, tensors_.sink(h), kept_log_weights);

    std::vector<double> kept(full.size()), difference(static_cast<std::size_t>(tensors_.v.dim));
    Naive found;
    for (std::size_t slot = 0; slot < seen.size(); ++slot) {
      const auto j = static_cast<std::size_t>(seen[slot]);
      kept[j] = over_kept[slot];
      found.mass += full[j];
    }
    for (std::size_t j = 0; j < full.size(); ++j) {
      found.l1 += std::abs(full[j] - kept[j]);
      for (std::size_t c = 0; c < difference.size(); ++c)
        difference[c] += full[j] * values_[kv][j][c] - kept[j] * stored_values_[kv][j][c];
    }
    found.error = std::sqrt(product(difference, difference));
    return found;
  }

 private:
  const LayerTensors& tensors_;
  std::vector<HeadRows> queries_, keys_, values_, stored_keys_, stored_values_;
};

}  // namespace kvreplay
