#include "policies/selectors/sampled.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "policies/arithmetic/ranking.h"
#include "policies/plan_part.h"
#include "positions.h"
#include "random.h"

namespace kvreplay {
namespace {

struct SampledPart : Sampled {
  static constexpr PartKind kind = PartKind::select;
  static constexpr const char* name = "sampled";
  static constexpr const char* summary = "highest-scored tokens, and tokens sampled by the softmax of the scores";

  void fill(Plan& plan) const { plan.select = selector(); }
};

const RegisteredPart<SampledPart> registered;

std::uint64_t hash(const Sampled& part, const Row& row, std::int32_t position) {
  const Residents& residents = row.view->residents();
  const std::uint64_t of_token = chain(part.seed, row.view->stored_layer(), row.number, position);
  const bool again = part.weights == SampleWeights::score && residents.added < row.tokens;
  return again ? mix(of_token ^ static_cast<std::uint64_t>(residents.seen)) : of_token;
}

Kept sampled(const Sampled& part, const Row& row) {
  const int slots = row.budget - row.sinks - row.recent;
  const int drawn = Amount::fraction(part.share).of(slots);
  const auto candidates = static_cast<std::size_t>(row.tokens - row.sinks - row.recent);
  const std::span<const double> scores = row.scores.subspan(static_cast<std::size_t>(row.sinks), candidates);

  std::vector<std::int32_t> chosen = largest(scores, slots - drawn);
  if (drawn > 0) {
    const std::span<const std::int32_t> positions =
        row.view->positions(row.number).numbers().subspan(static_cast<std::size_t>(row.sinks));
    std::vector<double> perturbed(candidates);
    for (std::size_t i = 0; i < candidates; ++i) {
      const double u = uniform(hash(part, row, positions[i]));
      const double log_weight =
          part.weights == SampleWeights::softmax ? scores[i] / part.temperature : std::log(scores[i]);
      perturbed[i] = log_weight - std::log(-std::log(u));
    }
    for (const std::int32_t best : chosen)
      perturbed[static_cast<std::size_t>(best)] = -std::numeric_limits<double>::infinity();
    std::vector<std::int32_t> all;
    std::ranges::set_union(chosen, largest(perturbed, drawn), std::back_inserter(all));
    chosen = std::move(all);
  }

  Kept kept{position_range(0, row.sinks), row.sinks, row.recent};
  for (const std::int32_t candidate : chosen) kept.positions.push_back(row.sinks + candidate);
  std::ranges::copy(position_range(row.tokens - row.recent, row.tokens), std::back_inserter(kept.positions));
  return kept;
}

}  // namespace

void Sampled::parameters(Parameters& p) {
  const auto read = p.of_part("select");
  p.add("random", share, RealRange{0.0, 1.0}, "share of the slots filled by sampling");
  p.add("temperature", temperature, RealRange{1e-6, 1e6}, "sampling temperature: higher values are closer to uniform");
  p.add_seed("seed", seed, "random seed");
}

Selector Sampled::selector() const {
  return {.select = [part = *this](const Row& row) { return sampled(part, row); }, .reads_layer = true};
}

}  // namespace kvreplay
