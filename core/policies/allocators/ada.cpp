#include "policies/allocators/ada.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

#include "policies/allocators/allocation.h"
#include "policies/arithmetic/apportion.h"
#include "policies/arithmetic/ranking.h"
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

struct AdaPart : AdaptiveHeads {
  static constexpr PartKind kind = PartKind::allocate;
  static constexpr const char* name = "ada";
  static constexpr const char* summary =
      "per-head budgets by the number of the layer's highest scores in each head, with a minimum for every head";

  void fill(Plan& plan) const { plan.allocate = within_layer(allocator()); }
};

const RegisteredPart<AdaPart> registered;

/// Multiplies the scores of each head by the share of its highest candidates in the sum of its candidates. Infinite
/// scores are unchanged: in the limit, positive ones make up the whole sum, and negative ones nothing of it.
Matrix normalised(const Division& division, Matrix scores) {
  for (int head = 0; head < scores.rows(); ++head) {
    const std::span<const double> candidates = scores.row(head).subspan(
        static_cast<std::size_t>(division.sinks), static_cast<std::size_t>(division.candidates()));
    const auto add = [](double sum, double score) { return score == -infinity ? sum : sum + score; };
    double best = 0;
    for (const std::int32_t i : largest(candidates, division.slots()))
      best = add(best, candidates[static_cast<std::size_t>(i)]);
    const double all = std::accumulate(candidates.begin(), candidates.end(), 0.0, add);
    const double share = all == infinity ? 1.0 : all != 0 ? best / all : 0.0;
    for (double& score : scores.row(head))
      if (std::isfinite(score)) score *= share;
  }
  return scores;
}

}  // namespace

void AdaptiveHeads::parameters(Parameters& p) {
  const auto read = p.of_part("allocate");
  p.add("alpha", alpha, RealRange{0.0, 1.0}, "share of the slots allocated equally to all heads (resolution: 0.001)");
  p.add("normalise", normalise,
        "weights the scores of a head by the share of its highest scores in its total before heads are compared");
}

WithinLayer AdaptiveHeads::allocator() const {
  return [part = *this](const Division& division, const Matrix& scores) {
    const auto equal = static_cast<std::int64_t>(std::lround(1000 * part.alpha));
    std::vector<std::int64_t> weights;
    for (const int count :
         ranked_within_layer(division, part.normalise ? normalised(division, scores) : Matrix(scores)))
      weights.push_back((1000 - equal) * (count - division.by_rule()) + equal * division.slots());
    std::vector<int> counts =
        apportion(std::int64_t{division.slots()} * scores.rows(), weights, 0, division.candidates());
    for (int& count : counts) count += division.by_rule();
    return counts;
  };
}

}  // namespace kvreplay
