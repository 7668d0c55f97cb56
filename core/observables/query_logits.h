// Logits of single queries over the resident tokens, in float32 on this machine: for scores that are not sums of
// attention, which a backend computes.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>

#include "attention/softmax_keys.h"
#include "cpu/softmax_block.h"
#include "cpu/tile.h"
#include "observables/layer_view.h"

namespace kvreplay {

/// What a query head gives the resident tokens [first, end), which the query sees: z(t,j) / ln 2 under the softcap.
struct HeadLogits {
  int head = 0;
  int first = 0;
  int end = 0;
  float* logits = nullptr;        // [n]; may be changed between `first` and `end`
  float* exponentials = nullptr;  // [n], to work in
  const TileKernels* kernels = nullptr;

  std::span<float> seen() const { return {logits + first, logits + end}; }
  /// sums[j] += weight * softmax(logits)[j] from `first` to `end`. `sink`: a logit that takes part, in units of 1.
  /// Throws Error{input} where a logit is not finite.
  void add_softmax(double weight, std::span<double> sums, double sink = -std::numeric_limits<double>::infinity()) const;
};

/// Of the query heads that read one KV head. The view must outlive it.
class QueryLogits {
 public:
  QueryLogits(const LayerView& view, int kv_head);

  /// Calls visit(position, heads) for each of these queries, ascending. With cache positions they must be resident.
  using Visit = std::function<void(std::int32_t position, std::span<HeadLogits> heads)>;
  void of_each(std::span<const std::int32_t> queries, const Visit& visit) const;

 private:
  const LayerView& view_;
  const int kv_head_;
  const TileKernels& kernels_;
  SoftmaxKeys keys_;
  PackedKeys packed_;
};

}  // namespace kvreplay
