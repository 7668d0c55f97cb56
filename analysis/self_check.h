// What must hold in every run: a cell that breaks a law of this page is failed, and says where.
//
// - A set that keeps everything has recall and cosines of exactly 1 and errors of exactly 0.
// - Everything is a finite number.
// - A sum over some keys is at most the sum over all: mass <= 1, squares <= the full ones.
// - The general comparison, which builds ã, agrees with the kept moments (identities: attention_l1 = 2 (1 - m),
//   attention_cosine² = Σ_{K'} a² / Σ a²) within `path_tolerance`, relative above 1.
// - Of sets that do not change with time: recall equals what the column sums of the eval queries' attention say of the
//   kept set, within `path_tolerance`, and is no more than the tokens of the greatest such sums have, as many of them,
//   within `oracle_tolerance`.
// - Where logits are large, both tolerances are `tolerance_at` them.
// - Kept slots are within layers * rows * budget.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "attention/backend.h"
#include "replay/replay.h"

namespace kvreplay {

inline constexpr double path_tolerance = 1e-5;
inline constexpr double oracle_tolerance = 1e-6;
/// A logit of float32 is off by so many units of rounding, 2^-24 |z| each, and its exponential by as large a share.
inline constexpr double logit_rounding_units = 4;

/// The tolerance, or what rounding alone makes of logits up to |z| = `largest_logit` where that is more.
double tolerance_at(double tolerance, double largest_logit);

enum class Law { full, budget, identity, oracle };

/// Rows, not heads, where a law speaks of rows of the policy's granularity.
struct Violation {
  Law law;
  int stored_layer = -1;  // -1: the whole cell
  int head = -1;          // -1: the whole layer
  std::string what;
  std::string expected;
  std::string found;

  /// "layer 3, head 1: attention_l1: expected 0, found 0.25"
  std::string text() const;
};

/// Whether every sum is a number.
bool is_finite(const Moments& moments);

/// Head and layer are the caller's to fill in.
std::optional<Violation> check_moments(const Moments& kept, const Moments& full, bool keeps_everything);
/// What the moments were not asked for is not compared, nor outputs whose squared norm is below 2^-240, as their
/// components are near the denormal numbers. `largest_logit`: of the row.
std::optional<Violation> check_comparison(const Comparison& compared, const Moments& kept, const Moments& full,
                                          MomentParts parts = all_moments, double largest_logit = 0);

/// Recall of one row of a policy's granularity, mean over eval queries and the row's query heads, as the sums of
/// attention that each prompt token gets (a query's own key left out) say it.
struct ExpectedRecall {
  double of_set = 0;     // of the kept set
  double of_oracle = 0;  // of the best set of that size
};

/// What LayerView::eval_attention says of any set of one layer: read once for each granularity.
class RecallByAttention {
 public:
  /// `view` must outlive it.
  explicit RecallByAttention(const LayerView& view) : view_(view) {}

  /// [H].
  std::vector<ExpectedRecall> of(const KeptSet& set);
  /// [Hq] of the best set with the counts of `set`: its tokens are the best of a row, for all query heads of the row.
  std::vector<double> of_best_set(const KeptSet& set);

 private:
  struct Row {
    std::vector<double> column;        // [P] sums over eval queries and the row's query heads
    std::vector<std::int32_t> ranked;  // [P] tokens by descending sum
    std::vector<double> greatest;      // [P + 1] sum of the n greatest
    double pairs = 0;                  // of eval queries and query heads
    double always_kept = 0;            // the sum over keys that no policy can evict
  };
  const std::vector<Row>& rows(const KeptSet& set);

  const LayerView& view_;
  std::map<Heads, std::vector<Row>> rows_;
  std::map<std::tuple<Heads, int, int>, double> best_;  // of_best_set by granularity, query head and count
};

/// `largest_logit`: of the eval queries' rows.
std::optional<Violation> check_recall(const ExpectedRecall& expected, double recall, double largest_logit = 0);

/// Selections of all treated layers against a budget of tokens a row.
std::optional<Violation> check_budget(std::span<const LayerSelection> layers, int budget);

}  // namespace kvreplay
