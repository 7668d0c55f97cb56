// The resident tokens of a layer while its tokens are processed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "matrix.h"
#include "policies/plan.h"
#include "policies/schedule.h"
#include "policies/selection.h"

namespace kvreplay {

/// Resident tokens of each row, with the attention that they have received.
class HeldTokens {
 public:
  /// The first `whole` tokens are kept at every eviction, and a policy's sinks are among them.
  explicit HeldTokens(const ScheduledLayer& layer, int whole = 0);

  int tokens() const { return tokens_; }
  /// Number of resident tokens of a row, the same for all rows.
  int held() const { return static_cast<int>(held_.front().size()); }

  /// Adds the tokens [seen, end), then evicts down to `keep`. Sinks and recent tokens are protected within `budget`
  /// and `keep`, which counts the whole tokens: a sink that was evicted at a smaller budget is no longer protected;
  /// recent tokens may take its slot. With `by_relevance` the kept tokens are in the order of their scores.
  void append_and_cut(int end, int keep, int budget, bool by_relevance = false);

  /// Adds the remaining tokens without eviction.
  LayerSelection finish();

  /// Tokens that the latest eviction protected at the end.
  int recent() const { return recent_; }
  int rows() const { return static_cast<int>(held_.size()); }
  const std::vector<std::int32_t>& row(int number) const { return held_[static_cast<std::size_t>(number)]; }

 private:
  void cut_row(const LayerView& now, const Matrix& scores, int row, RowBudget budget, bool by_relevance);
  void carry_attention(const LayerView& now);

  const LayerView& view_;
  const Plan& plan_;
  std::string who_;
  Positions place_;
  int whole_;
  int tokens_;
  int seen_ = 0;
  LayerSelection selection_;
  std::vector<std::vector<std::int32_t>> held_;
  int recent_ = 0;
  Matrix attention_;
};

/// A schedule that evicts resident tokens, in all rows at once.
class CuttingSchedule : public Schedule {
 public:
  bool repeats(Heads heads) const final { return heads == Heads::query; }
  LayerSelection run(const ScheduledLayer& layer) const final;

 protected:
  /// run() where no two query heads share a KV head and have sets of their own.
  virtual LayerSelection cut(const ScheduledLayer& layer) const = 0;
};

}  // namespace kvreplay
