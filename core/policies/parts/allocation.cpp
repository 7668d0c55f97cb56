#include "policies/parts/allocation.h"

#include <algorithm>

#include "policies/parts/ranking.h"
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

/// How many of the best rows * slots candidates lie in each row, for matrices one after another; what stays by rule
/// included.
std::vector<std::vector<int>> counts_of_best(const Division& division, std::span<const Matrix> scores) {
  std::vector<double> flat;
  int slots = 0;
  for (const Matrix& layer : scores) {
    for (int row = 0; row < layer.rows(); ++row)
      std::ranges::copy(layer.row(row).subspan(static_cast<std::size_t>(division.sinks),
                                               static_cast<std::size_t>(division.candidates())),
                        std::back_inserter(flat));
    slots += layer.rows() * division.slots();
  }
  const std::vector<std::int32_t> best = largest(flat, slots);
  std::vector<std::vector<int>> counts;
  std::int32_t begin = 0;
  for (const Matrix& layer : scores) {
    std::vector<int>& of_layer = counts.emplace_back(static_cast<std::size_t>(layer.rows()));
    for (int& count : of_layer) {
      const std::int32_t end = begin + division.candidates();
      count = division.by_rule() +
              static_cast<int>(std::ranges::lower_bound(best, end) - std::ranges::lower_bound(best, begin));
      begin = end;
    }
  }
  return counts;
}

const RegisteredFixedPart registered_uniform{PartKind::allocate, "uniform", "every layer and head gets B",
                                             [](Plan& plan) { plan.allocate = Uniform{}; }};
const RegisteredFixedPart registered_layer{PartKind::allocate, "ranked-layer",
                                           "the best entries of all heads of a layer together",
                                           [](Plan& plan) { plan.allocate = ranked_within_layer(); }};
const RegisteredFixedPart registered_global{PartKind::allocate, "ranked-global",
                                            "the best entries of all layers and heads together",
                                            [](Plan& plan) { plan.allocate = ranked_across_layers(); }};

}  // namespace

WithinLayer ranked_within_layer() {
  return [](const Division& division, const Matrix& scores) { return counts_of_best(division, {&scores, 1}).front(); };
}

AcrossLayers ranked_across_layers() { return counts_of_best; }

}  // namespace kvreplay
