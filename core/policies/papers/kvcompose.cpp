#include <algorithm>
#include <functional>
#include <vector>

#include "observables/reconstruction.h"
#include "policies/allocators/allocation.h"
#include "policies/plan_part.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

/// Composite tokens: the i-th one of a layer consists of the i-th best token of each head, and its score is their mean.
/// In the first layer it is the largest of all layers, so that no layer keeps more tokens.
LayerCounts counts_of_composite_tokens(const Division& division, LayerScores scores) {
  const int candidates = division.candidates();
  std::vector<Matrix> composites;
  for (const Matrix* layer : scores) {
    Matrix& sums = composites.emplace_back(1, candidates);
    for (int row = 0; row < layer->rows(); ++row) {
      const std::span<const double> all =
          layer->row(row).subspan(static_cast<std::size_t>(division.sinks), static_cast<std::size_t>(candidates));
      std::vector<double> ordered(all.begin(), all.end());
      std::ranges::sort(ordered, std::greater{});
      for (int i = 0; i < candidates; ++i) sums(0, i) += ordered[static_cast<std::size_t>(i)];
    }
    for (double& score : sums.row(0)) score /= layer->rows();
  }
  std::vector<const Matrix*> of_layers;
  for (const Matrix& layer : composites) {
    for (int i = 0; i < candidates; ++i) composites.front()(0, i) = std::max(composites.front()(0, i), layer(0, i));
    of_layers.push_back(&layer);
  }
  LayerCounts counts = ranked_slots(std::int64_t{division.slots()} * std::ssize(scores), of_layers);
  for (std::vector<int>& of_rows : counts)
    of_rows.assign(static_cast<std::size_t>(division.rows), of_rows.front() + division.by_rule());
  return counts;
}

struct KvCompose {
  static constexpr Card card{
      .name = "kvcompose",
      .summary =
          "Largest attention of passes that repeat the prompt; per-layer budgets by composite tokens, which "
          "align the ranks of the heads",
      .paper = "Akulov et al. 2025, KVCompose, arXiv:2509.05165",
      .score =
          "s[h,j] = m[h,j] + mean over heads of m[.,j], m the group mean of the max over queries t of the passes of "
          "softmax_j(q_t k_j); layers compete by the mean over heads of the i-th highest s",
      .family = Family::budget,
  };

  Grouping grouping = {};

  void parameters(Parameters& p) { grouping.parameters(p); }

  static Matrix score(const LayerView& view, const Scoring& how) {
    const std::vector<PassTokens> reads(view.place().reconstruction.passes.size(), {.end = view.prompt()});
    Matrix scores = how.grouping(largest_attention_of_passes(view, reads), view.group());
    const Matrix sums = sum_over_rows(scores);
    for (int row = 0; row < scores.rows(); ++row)
      for (int j = 0; j < scores.columns(); ++j) scores(row, j) += sums(0, j) / scores.rows();
    return scores;
  }

  Plan plan() const {
    return {
        .grouping = grouping,
        .score = {.score = score,
                  .needs = {.reconstruction = true},
                  .of_prompt = true,
                  .quadratic = true,
                  .name = "kvcompose"},
        .allocate = across_layers(counts_of_composite_tokens),
    };
  }
};

const Registered<KvCompose> registered;

}  // namespace
}  // namespace kvreplay
