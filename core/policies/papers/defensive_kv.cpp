#include <algorithm>
#include <cstdint>
#include <numeric>

#include "policies/allocators/allocation.h"
#include "policies/arithmetic/pooling.h"
#include "policies/plan_part.h"
#include "policies/policy.h"
#include "policies/scores/window_score.h"

namespace kvreplay {
namespace {

double sum_of(std::span<const double> numbers) { return std::accumulate(numbers.begin(), numbers.end(), 0.0); }

struct DefensiveKv {
  static constexpr Card card{
      .name = "defensive-kv",
      .summary =
          "Defensive aggregation: maximum attention over the queries of the observation window, with the head's mean "
          "as lower bound",
      .paper = "Feng et al. 2025, DefensiveKV, arXiv:2510.13334",
      .score = "s[h,j] = max(m[h,j], mean over j of m), m the maximum over queries and group of pooled attention",
      .family = Family::attention,
  };

  int window = 32;
  int kernel = 5;
  Pool pool = Pool::average;
  Grouping grouping = {.aggregate = Aggregate::max};

  void parameters(Parameters& p) {
    add_window(p, window);
    add_pooling(p, pool, kernel);
    grouping.parameters(p);
  }

  Matrix score(const LayerView& view, const Scoring& how) const {
    const Candidates candidates = candidates_of(view.tokens(), how);
    Matrix most(view.query_heads(), view.tokens());
    const auto weigh = [&](const Matrix& row) {
      Matrix smooth = pooled(row, pool, kernel, candidates);
      for (int head = 0; head < row.rows(); ++head) {
        // Pooling does not change the sum of a query's attention over the candidates.
        const std::span<const double> smooth_row = candidates.of(smooth.row(head));
        const double before = sum_of(candidates.of(row.row(head))), after = sum_of(smooth_row);
        const std::span<double> worst = candidates.of(most.row(head));
        for (std::size_t j = 0; j < worst.size() && after > 0; ++j)
          worst[j] = std::max(worst[j], smooth_row[j] / after * before);
      }
    };
    // One query at a time: all queries at once would take `window` times the memory of the scores.
    for (const std::int32_t query : view.last_queries(window, how.window_end)) weigh(view.attention({&query, 1}));
    Matrix risk = how.grouping(most, view.group());
    for (int head = 0; head < risk.rows() && candidates.count > 0; ++head) {
      const std::span<double> of_head = candidates.of(risk.row(head));
      const double prior = sum_of(of_head) / candidates.count;
      for (double& one : of_head) one = std::max(one, prior);
    }
    return risk;
  }

  Plan plan() const {
    return {
        .grouping = grouping,
        .score = {.score = [*this](const LayerView& view, const Scoring& how) { return score(view, how); },
                  .needs = last_queries(window),
                  .reads_recent = true,
                  .reads_sinks = true,
                  .places_window = true,
                  .name = name_with_values("defensive-kv", *this)},
        .protect = {.recent = Amount::tokens(window)},
        .allocate = within_layer(ranked_within_layer),
    };
  }
};

const Registered<DefensiveKv> registered;

}  // namespace
}  // namespace kvreplay
