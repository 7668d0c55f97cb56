#include "replay/sample.h"

#include <algorithm>
#include <utility>

#include "random.h"

namespace kvreplay {
namespace {

/// 0 ... count - 1.
int below(int count, std::uint64_t random) {
  return std::min(count - 1, static_cast<int>(uniform(random) * static_cast<double>(count)));
}

/// The first answer of a plan of the policy, or of a policy whose counts or sets it takes; empty: there is none.
template <class Why>
std::string first_reason(const ConfiguredPolicy& policy, int layers, Why why) {
  for (const LayerPlan& of_range : policy.plans(layers)) {
    if (std::string reason = why(of_range.plan); !reason.empty()) return reason;
    if (const auto& other = of_range.plan.allocate->other)
      if (std::string reason = first_reason(*other, layers, why); !reason.empty()) return other->label() + " " + reason;
  }
  return "";
}

/// The unit at a place of the ring: 0 2 4 ... 5 3 1.
int unit_at(int place, int population) { return 2 * place < population ? 2 * place : 2 * (population - 1 - place) + 1; }

}  // namespace

void SampleSizes::parameters(Parameters& p) {
  p.add("layers", layers, IntRange{.least = 2}, "layers that are replayed, an even number");
  p.add("heads", heads, IntRange{.least = 2}, "KV heads of each layer whose queries are measured, an even number");
  p.add("queries", queries, IntRange{.least = 2}, "eval queries that are measured, an even number");
}

SampleSizes SampleSizes::parse(std::string_view text) {
  SampleSizes sizes;
  Parameters parameters{"--sample"};
  sizes.parameters(parameters);
  parameters.set_list(text, "layers=6,heads=4,queries=256");
  for (const auto& [name, size] :
       {std::pair{"layers", sizes.layers}, {"heads", sizes.heads}, {"queries", sizes.queries}})
    if (size % 2 != 0)
      throw Error{Refusal::usage, std::string("--sample: ") + name, "not in pairs", "an even number",
                  std::to_string(size)};
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
    for (const int place : {first, other + (other >= first ? 1 : 0)})
      units.push_back(unit_at((begin + place + cut) % population, population));
  }
  return units;
}

std::string why_no_sample_of_queries(const ConfiguredPolicy& policy, int layers) {
  return first_reason(policy, layers, [](const Plan& plan) {
    return needs_of(plan).future_queries ? "selects by the attention of all eval queries" : "";
  });
}

std::string why_no_sample_of_layers(const ConfiguredPolicy& policy, int layers) {
  return first_reason(policy, layers, [](const Plan& plan) {
    if (plan.allocate->from == CountsFrom::all_layers) return "allocates tokens by the scores of all layers";
    if (plan.nesting != Nesting::none) return "selects within the kept set of the layer before";
    if (plan.share.shares() || plan.share.pools()) return "uses the set of one layer in others";
    return plan.store->pairs_layers() ? "stores layers in pairs" : "";
  });
}

}  // namespace kvreplay
