// Stores that merge the values of evicted tokens into those of the tokens that remain, at each eviction.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "policies/selection.h"
#include "policies/store.h"

namespace kvreplay {

/// Memory that begins with a cache line, so that no vector of eight values lies in two lines.
template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t line{64};

  T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), line)); }
  void deallocate(T* memory, std::size_t) { ::operator delete(memory, line); }
  bool operator==(const LineAllocator&) const = default;
};

/// The values of one KV head, summed in float64 and rounded to float32 where they are read.
class HeadValues {
 public:
  HeadValues(const TensorView& values, int head);

  std::span<const double> of(std::int32_t token) const { return std::span(sums_).subspan(first(token), dim_); }
  /// To be changed.
  std::span<double> sum_of(std::int32_t token) {
    if (!changed_[static_cast<std::size_t>(token)]) to_round_.push_back(token);
    changed_[static_cast<std::size_t>(token)] = true;
    return std::span(sums_).subspan(first(token), dim_);
  }
  /// [T, d]
  std::span<const float> rounded();

 private:
  std::size_t first(std::int32_t token) const { return static_cast<std::size_t>(token) * dim_; }

  std::size_t dim_;
  std::vector<float> rounded_;
  std::vector<double, LineAllocator<double>> sums_;
  std::vector<bool> changed_;           // [T] since they were rounded
  std::vector<std::int32_t> to_round_;  // these tokens
};

/// A layer whose values change with each eviction. Its bytes are those of the kept tokens.
class MergingLayer : public EvolvingLayer {
 public:
  MergingLayer(const LayerView& view, const LayerSelection& selection);

  /// Merges up to the end of the prompt, from where readers of later queries then go on. Called once, before them.
  void merge_prompt();
  std::unique_ptr<StoredLayer> before(int query) const final;
  Reader of_head(int kv_head) const final;

 protected:
  /// Merges the values of a KV head that are evicted after the queries `some`. Called on any thread, for all of steps()
  /// in ascending order.
  virtual void merge(int head, std::span<const std::int32_t> some, HeadValues& values) const = 0;

  /// Those of the steps `some` among merges that are ascending by their `step`.
  template <class Merge>
  static std::span<const Merge> merges_of(std::span<const std::int32_t> some, const std::vector<Merge>& merges) {
    return {std::ranges::lower_bound(merges, some.front(), {}, &Merge::step),
            std::ranges::upper_bound(merges, some.back(), {}, &Merge::step)};
  }

  const LayerView& view() const { return view_; }
  int rows() const { return rows_; }
  int row_of(int head) const { return rows_ == 1 ? 0 : head; }
  /// Queries after which at least one row evicts, ascending.
  const std::vector<std::int32_t>& steps() const { return steps_; }
  /// [T] the query after which a row evicts each token, -1 never.
  std::span<const std::int32_t> evicted_at(int row) const {
    return std::span(evicted_at_).subspan(static_cast<std::size_t>(row) * tokens_, tokens_);
  }
  /// Whether a row still holds a token after the evictions of query `step`, where it has come.
  bool remains(int row, std::int32_t token, std::int32_t step) const {
    const std::int32_t at = evicted_at(row)[static_cast<std::size_t>(token)];
    return at < 0 || at > step;
  }

 private:
  std::vector<std::int32_t> resident_after_prompt(int row) const;
  /// Merges the values of a KV head that are evicted from steps()[done] on and before `query`; how many steps are done.
  std::size_t merge_before(int query, int head, std::size_t done, HeadValues& values) const;

  const LayerView& view_;
  int rows_;
  std::size_t tokens_;                    // T
  std::vector<std::int32_t> evicted_at_;  // [rows, T]: the query after which each token is evicted, -1 never
  std::vector<std::int32_t> steps_;
  double bytes_ = 0;
  std::vector<std::vector<double>> after_prompt_;  // [Hkv][resident tokens, d] sums; empty: not merged yet
};

using MakeMergingLayer = std::function<std::unique_ptr<MergingLayer>(const LayerView&, const LayerSelection&)>;

/// A store of such layers. Sets that are decided once are an eviction after the last query of the prompt.
Store merging_store(std::string name, const MakeMergingLayer& make);

}  // namespace kvreplay
