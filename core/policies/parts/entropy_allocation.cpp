#include "policies/parts/entropy_allocation.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "policies/parts/allocation.h"
#include "policies/parts/apportion.h"
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

double normalised_entropy(const Division& division, const Matrix& scores) {
  const auto candidates = [&](int row) {
    return scores.row(row).subspan(static_cast<std::size_t>(division.sinks),
                                   static_cast<std::size_t>(division.candidates()));
  };
  double sum = 0, entropy = 0;
  std::int64_t infinite = 0;
  for (int row = 0; row < scores.rows(); ++row)
    for (const double score : candidates(row)) {
      if (score < 0)
        throw Error{Refusal::input, "allocate=entropy", "a negative score", "scores of 0 or more, as attention has",
                    std::to_string(score)};
      sum += score;
      infinite += std::isinf(score) ? 1 : 0;
    }
  const double count = static_cast<double>(scores.rows()) * division.candidates();
  if (sum == 0 || count < 2) return 0;
  // In the limit infinite scores have equal shares, and the others none.
  if (infinite > 0) return std::log(static_cast<double>(infinite)) / std::log(count);
  for (int row = 0; row < scores.rows(); ++row)
    for (const double score : candidates(row))
      if (score > 0) entropy -= score / sum * std::log(score / sum);
  return std::max(0.0, entropy / std::log(count));
}

const RegisteredFixedPart registered{PartKind::allocate, "entropy",
                                     "layers by how evenly their scores are spread, heads by the best entries",
                                     [](Plan& plan) { plan.allocate = by_entropy(); }};

}  // namespace

AcrossLayers by_entropy() {
  return [](const Division& division, std::span<const Matrix* const> scores) {
    std::vector<double> weights;
    for (const Matrix* layer : scores) weights.push_back(normalised_entropy(division, *layer));
    const std::int64_t rows = scores.front()->rows();
    const std::vector<int> slots = apportion(rows * division.layers * division.slots(), weights, 0,
                                             static_cast<int>(rows) * division.candidates());
    std::vector<std::vector<int>> counts;
    for (std::size_t layer = 0; layer < scores.size(); ++layer)
      counts.push_back(counts_of_best(division, *scores[layer], slots[layer]));
    return counts;
  };
}

}  // namespace kvreplay
