#include "policies/allocators/allocation.h"

#include <algorithm>

#include "policies/arithmetic/ranking.h"
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

/// Number of the `slots` highest entries of the columns [first, first + columns) in each row, over a list of matrices.
std::vector<std::vector<int>> counts_in(std::int64_t slots, std::span<const Matrix* const> scores, int first,
                                        int columns) {
  std::vector<std::span<const double>> rows;
  std::vector<double> all;
  for (const Matrix* layer : scores)
    for (int row = 0; row < layer->rows(); ++row) {
      rows.push_back(layer->row(row).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(columns)));
      std::ranges::copy(rows.back(), std::back_inserter(all));
    }
  std::vector<std::vector<int>> counts;
  Cut cut = cut_after(all, slots);
  auto row = rows.cbegin();
  for (const Matrix* layer : scores) {
    std::vector<int>& of_layer = counts.emplace_back(static_cast<std::size_t>(layer->rows()));
    for (int& count : of_layer) {
      const auto above = std::ranges::count_if(*row, [&cut](double score) { return score > cut.score; });
      const auto ties = std::min<std::int64_t>(cut.equal, std::ranges::count(*row, cut.score));
      cut.equal -= ties;
      count = static_cast<int>(above + ties);
      ++row;
    }
  }
  return counts;
}

/// Of what does not stay by rule; this is added.
std::vector<std::vector<int>> counts_of_candidates(const Division& division, std::span<const Matrix* const> scores,
                                                   std::int64_t slots) {
  std::vector<std::vector<int>> counts = counts_in(slots, scores, division.sinks, division.candidates());
  for (std::vector<int>& of_layer : counts)
    for (int& count : of_layer) count += division.by_rule();
  return counts;
}

const RegisteredFixedPart registered_uniform{PartKind::allocate, "uniform", "budget B for every layer and head",
                                             [](Plan& plan) { plan.allocate = uniform(); }};
const RegisteredFixedPart registered_layer{PartKind::allocate, "ranked-layer",
                                           "highest scores of all heads of a layer together",
                                           [](Plan& plan) { plan.allocate = within_layer(ranked_within_layer); }};
const RegisteredFixedPart registered_global{PartKind::allocate, "ranked-global",
                                            "highest scores of all layers and heads together",
                                            [](Plan& plan) { plan.allocate = across_layers(ranked_across_layers); }};

}  // namespace

std::vector<int> counts_of_best(const Division& division, const Matrix& scores, std::int64_t slots) {
  const Matrix* const layer = &scores;
  return counts_of_candidates(division, {&layer, 1}, slots).front();
}

std::vector<int> ranked_within_layer(const Division& division, const Matrix& scores) {
  return counts_of_best(division, scores, std::int64_t{division.slots()} * scores.rows());
}

LayerCounts ranked_across_layers(const Division& division, LayerScores scores) {
  const std::int64_t rows = std::int64_t{scores.front()->rows()} * std::ssize(scores);
  return counts_of_candidates(division, scores, division.slots() * rows);
}

LayerCounts ranked_slots(std::int64_t slots, LayerScores scores) {
  return counts_in(slots, scores, 0, scores.front()->columns());
}

}  // namespace kvreplay
