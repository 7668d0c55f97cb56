#include "policies/scores/recency_window.h"

#include <algorithm>
#include <numeric>

#include "policies/plan_part.h"

namespace kvreplay {
namespace {

constexpr Choice<Over> over_words[] = {{"resident", Over::resident}, {"all", Over::all}};

std::vector<double> weights(int window, double last) {
  std::vector<double> all(static_cast<std::size_t>(window), 1.0);
  for (int i = 1; i < window; ++i) all[static_cast<std::size_t>(i)] = 1.0 + (last - 1.0) * i / (window - 1);
  return all;
}

/// For each row, the columns of its resident positions.
Matrix resident_columns(const Matrix& all, const LayerView& view) {
  Matrix some(all.rows(), view.tokens());
  for (int row = 0; row < all.rows(); ++row)
    for (int i = 0; i < some.columns(); ++i) some(row, i) = all(row, view.positions(row)[i].number);
  return some;
}

/// [Hq, seen]: weighted attention of the last queries before `end` with all that they could see, resident or not.
Matrix attention_over_all(const LayerView& view, std::span<const double> weights, int end) {
  const int last = view.queries_before(LayerView::newest, end);
  const std::vector<std::int32_t> queries =
      position_range(last - view.queries_before(static_cast<int>(weights.size()), end), last);
  return view.backend().attention_sums(
      view.tensors(), {.queries = queries, .weights = weights.last(queries.size()), .columns = view.residents().seen});
}

struct RecencyPart : RecencyWindow {
  static constexpr PartKind kind = PartKind::score;
  static constexpr const char* name = "recency-window";
  static constexpr const char* summary = "attention of the recent window, with larger weights for later queries";

  void fill(Plan& plan) const { plan.score = scorer(); }
};

const RegisteredPart<RecencyPart> registered;

}  // namespace

void RecencyWindow::parameters(Parameters& p) {
  const auto read = p.of_part("score");
  p.add("distance_weight", distance_weight, RealRange{.least = 1e-6, .most = 1e6},
        "weight of the newest query, relative to the first query of the window");
  p.add<Over>("over", over, over_words, "softmax over the resident tokens, or over all tokens that were visible");
}

Scorer RecencyWindow::scorer() const {
  const auto score = [*this](const LayerView& view, const Scoring& how) {
    const int window = std::max(1, how.observing), end = how.window_end;
    if (distance_weight == 1.0 && over == Over::resident)  // what policies share
      return how.grouping(view.window_attention(window, end), view.group());
    const std::vector<double> rho = weights(window, distance_weight);
    if (over == Over::resident) return how.grouping(view.window_attention(rho, end), view.group());
    return resident_columns(how.grouping(attention_over_all(view, rho, end), view.group()), view);
  };
  return {.score = score,
          .needs = {.recent_queries = true},
          .places_window = true,
          .queries =
              [last = distance_weight](const LayerView& view, const Scoring& how) {
                const int queries = view.queries_before(std::max(1, how.observing), how.window_end);
                const std::vector<double> rho = weights(queries, last);
                return std::accumulate(rho.begin(), rho.end(), 0.0);
              },
          .name = name_with_values("recency-window", *this)};
}

}  // namespace kvreplay
