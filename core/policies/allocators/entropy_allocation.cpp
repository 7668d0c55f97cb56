#include "policies/allocators/entropy_allocation.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "policies/allocators/allocation.h"
#include "policies/arithmetic/apportion.h"
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
        throw Error{Refusal::input, "allocate=entropy", "negative score",
                    "scores of 0 or more, such as attention weights", std::to_string(score)};
      sum += score;
      infinite += std::isinf(score) ? 1 : 0;
    }
  const double count = static_cast<double>(scores.rows()) * division.candidates();
  if (sum == 0 || count < 2) return 0;
  // In the limit, infinite scores have equal shares, and finite ones the share 0.
  if (infinite > 0) return std::log(static_cast<double>(infinite)) / std::log(count);
  for (int row = 0; row < scores.rows(); ++row)
    for (const double score : candidates(row))
      if (score > 0) entropy -= score / sum * std::log(score / sum);
  return std::max(0.0, entropy / std::log(count));
}

struct EntropyPart : EntropyAllocation {
  static constexpr PartKind kind = PartKind::allocate;
  static constexpr const char* name = "entropy";
  static constexpr const char* summary =
      "per-layer budgets by the entropy of the scores, per-head budgets by the layer's highest scores";

  void fill(Plan& plan) const { plan.allocate = across_layers(allocator()); }
};

const RegisteredPart<EntropyPart> registered;

}  // namespace

void EntropyAllocation::parameters(Parameters& p) {
  const auto read = p.of_part("allocate");
  p.add("floor", floor, RealRange{0.0, 1.0}, "share of the slots allocated equally to all heads (resolution: 0.001)");
}

AcrossLayers EntropyAllocation::allocator() const {
  return [part = *this](const Division& division, std::span<const Matrix* const> scores) {
    std::vector<double> entropies;
    for (const Matrix* layer : scores) entropies.push_back(normalised_entropy(division, *layer));
    const auto rows = static_cast<std::size_t>(scores.front()->rows());
    const std::int64_t slots = static_cast<std::int64_t>(rows) * division.layers * division.slots();
    const std::vector<int> of_layers = apportion(slots, entropies, 0, static_cast<int>(rows) * division.candidates());

    const auto equal = static_cast<std::int64_t>(std::lround(1000 * part.floor));
    std::vector<std::int64_t> weights;  // [L * H]
    for (std::size_t layer = 0; layer < scores.size(); ++layer)
      for (const int count : counts_of_best(division, *scores[layer], of_layers[layer]))
        weights.push_back((1000 - equal) * (count - division.by_rule()) + equal * division.slots());
    const std::vector<int> of_heads = apportion(slots, weights, 0, division.candidates());

    std::vector<std::vector<int>> counts;
    for (std::size_t first = 0; first < of_heads.size(); first += rows)
      for (std::vector<int>& of_layer = counts.emplace_back(); of_layer.size() < rows;)
        of_layer.push_back(division.by_rule() + of_heads[first + of_layer.size()]);
    return counts;
  };
}

}  // namespace kvreplay
