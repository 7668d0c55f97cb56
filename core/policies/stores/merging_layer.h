// Stores that merge the values of evicted tokens into those of the tokens that remain, at each eviction.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "policies/selection.h"
#include "policies/store.h"

namespace kvreplay {

/// The values of one KV head, summed in float64 and rounded to float32 where they are read.
class HeadValues {
 public:
  HeadValues(const TensorView& values, int head);

  std::span<double> of(std::int32_t token) { return std::span(sums_).subspan(first(token), dim_); }
  /// Rounds a value that has changed.
  void round(std::int32_t token);
  /// [T, d]
  std::span<const float> rounded() const { return rounded_; }

 private:
  std::size_t first(std::int32_t token) const { return static_cast<std::size_t>(token) * dim_; }

  std::size_t dim_;
  std::vector<float> rounded_;
  std::vector<double> sums_;
};

/// A layer whose values change with each eviction. Its bytes are those of the kept tokens.
class MergingLayer : public EvolvingLayer {
 public:
  MergingLayer(const LayerView& view, const LayerSelection& selection);

  std::unique_ptr<StoredLayer> before(int query) const final;
  Reader of_head(int kv_head) const final;

 protected:
  /// Merges the values of a KV head that are evicted after query `step`. Called on any thread, for each of steps() in
  /// ascending order.
  virtual void merge(int head, std::int32_t step, HeadValues& values) const = 0;

  const LayerView& view() const { return view_; }
  int rows() const { return rows_; }
  int row_of(int head) const { return rows_ == 1 ? 0 : head; }
  /// Queries after which at least one row evicts, ascending.
  const std::vector<std::int32_t>& steps() const { return steps_; }
  /// Whether a row still holds a token after the evictions of query `step`, where it has come.
  bool remains(int row, std::int32_t token, std::int32_t step) const;

 private:
  const LayerView& view_;
  int rows_;
  std::vector<std::int32_t> evicted_at_;  // [rows, T]: the query after which each token is evicted, -1 never
  std::vector<std::int32_t> steps_;
  double bytes_ = 0;
};

using MakeMergingLayer = std::function<std::unique_ptr<MergingLayer>(const LayerView&, const LayerSelection&)>;

/// A store of such layers. Sets that are decided once are an eviction after the last query of the prompt.
Store merging_store(std::string name, const MakeMergingLayer& make);

}  // namespace kvreplay
