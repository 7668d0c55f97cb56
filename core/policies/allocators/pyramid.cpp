#include "policies/allocators/pyramid.h"

#include <cstdint>

#include "policies/arithmetic/apportion.h"
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

struct PyramidPart : Pyramid {
  static constexpr PartKind kind = PartKind::allocate;
  static constexpr const char* name = "pyramid";
  static constexpr const char* summary = "per-layer budgets in arithmetic progression, decreasing with depth";

  void fill(Plan& plan) const { plan.allocate = by_layer(allocator()); }
};

const RegisteredPart<PyramidPart> registered;

/// The terms of the sequence, scaled to whole numbers.
std::vector<std::int64_t> weights(const Pyramid& pyramid, const Division& division) {
  const std::int64_t steps = division.layers - 1, candidates = division.candidates(), slots = division.slots(),
                     beta = pyramid.beta;
  const bool uniform = pyramid.short_uniform && division.prompt < 2 * slots;
  const bool fits = slots * (2 * beta - 1) <= candidates * beta;
  std::vector<std::int64_t> terms;
  for (std::int64_t layer = 0; layer <= steps; ++layer)
    terms.push_back(uniform ? 1
                    : fits  ? (2 * beta - 1) * steps - 2 * layer * (beta - 1)
                            : steps * candidates - 2 * layer * (candidates - slots));
  return terms;
}

}  // namespace

void Pyramid::parameters(Parameters& p) {
  const auto read = p.of_part("allocate");
  p.add("beta", beta, IntRange{.least = 1},
        "the last layer gets 1/beta of the mean budget beside the window, the first layer 2 - 1/beta times this mean");
  p.add("short_uniform", short_uniform,
        "uses equal budgets if P is less than twice the mean budget beside the window, as PyramidKV's code does");
}

ByLayer Pyramid::allocator() const {
  return [pyramid = *this](const Division& division) {
    const std::int64_t slots = std::int64_t{division.layers} * division.slots();
    std::vector<int> counts = apportion(slots, weights(pyramid, division), 0, division.candidates());
    for (int& count : counts) count += division.by_rule();
    return counts;
  };
}

}  // namespace kvreplay
