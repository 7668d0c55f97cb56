#include "policies/scores/attention_counts.h"

#include <algorithm>

#include "policies/arithmetic/ranking.h"
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

struct CountsPart : AttentionCounts {
  static constexpr PartKind kind = PartKind::score;
  static constexpr const char* name = "counts";
  static constexpr const char* summary = "number of the last queries that give a token more than the average attention";

  void fill(Plan& plan) const { plan.score = scorer(); }
};

const RegisteredPart<CountsPart> registered;

/// [Hq, n]: number of the last `window` queries that give a token more than the average attention. A row of equal
/// logits counts for no token.
const Matrix& window_counts(const LayerView& view, int window, int end) {
  constexpr double above_uniform = 1.0 + 1e-6;
  const double queries = view.queries_before(window, end), last = view.queries_before(LayerView::newest, end);
  return view.remember("window_counts", {queries, last},
                       [&] { return view.attention(view.last_queries(window, end), {}, above_uniform); });
}

}  // namespace

void AttentionCounts::parameters(Parameters& p) {
  const auto read = p.of_part("score");
  p.add("history", history, IntRange{.least = 1}, "number of last queries that score the prompt");
  p.add("binary", binary, "true: counts the queries above the average; false: sums their attention");
}

Scorer AttentionCounts::scorer() const {
  const auto score = [*this](const LayerView& view, const Scoring& how) {
    Grouping grouping = how.grouping;
    // Counts are whole numbers: their sum orders tokens as their mean does.
    if (grouping.aggregate == Aggregate::mean) grouping.aggregate = Aggregate::sum;
    Matrix sums = grouping(view.window_attention(history, how.window_end), view.group());
    if (!binary) return sums;
    Matrix counts = grouping(window_counts(view, history, how.window_end), view.group());
    for (int row = 0; row < counts.rows(); ++row) break_ties(counts.row(row), sums.row(row));
    return counts;
  };
  Scorer scorer{
      .score = score, .needs = last_queries(history), .places_window = true, .name = name_with_values("counts", *this)};
  if (!binary)
    scorer.queries = [history = history](const LayerView& view, const Scoring& how) {
      return view.queries_before(history, how.window_end);
    };
  return scorer;
}

}  // namespace kvreplay
