#include "replay/sample.h"

#include <algorithm>

#include "random.h"

namespace kvreplay {
namespace {

/// 0 ... count - 1.
int below(int count, std::uint64_t random) {
  return std::min(count - 1, static_cast<int>(uniform(random) * static_cast<double>(count)));
}

}  // namespace

void SampleSizes::parameters(Parameters& p) {
  p.add("queries", queries, IntRange{.least = 2}, "eval queries that are measured, an even number");
}

SampleSizes SampleSizes::parse(std::string_view text) {
  SampleSizes sizes;
  Parameters parameters{"--sample"};
  sizes.parameters(parameters);
  parameters.set_list(text, "queries=256");
  if (sizes.queries % 2 != 0)
    throw Error{Refusal::usage, "--sample: queries", "not in pairs", "an even number", std::to_string(sizes.queries)};
  return sizes;
}

std::vector<int> draw_pairs(int population, int count, std::uint64_t seed) {
  const std::int64_t strata = count / 2;
  const int cut = below(population, chain(seed, 0));
  std::vector<int> units;
  for (std::int64_t s = 0; s < strata; ++s) {
    const auto begin = static_cast<int>(s * population / strata);
    const int size = static_cast<int>((s + 1) * population / strata) - begin;
    const int first = below(size, chain(seed, 1, s));
    const int other = below(size - 1, chain(seed, 2, s));  // among the other units of the stratum
    for (const int unit : {first, other + (other >= first ? 1 : 0)}) units.push_back((begin + unit + cut) % population);
  }
  return units;
}

std::string why_no_sample_of_queries(const ConfiguredPolicy& policy, int layers) {
  for (const LayerPlan& of_range : policy.plans(layers)) {
    if (needs_of(of_range.plan).future_queries) return "selects by the attention of all eval queries";
    if (const auto& other = of_range.plan.allocate->other)
      if (std::string reason = why_no_sample_of_queries(*other, layers); !reason.empty())
        return other->label() + " " + reason;
  }
  return "";
}

}  // namespace kvreplay
