#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "policies/policy.h"
#include "policies/text/configured.h"
#include "policies/text/inner_policy.h"
#include "policies/twin.h"

namespace kvreplay {
namespace {

struct RandomTwin {
  static constexpr Card card{
      .name = random_twin_name,
      .summary =
          "Another policy's kept set with its unprotected runs and gaps permuted: the same token counts at random "
          "positions",
      .paper = "",
      .score = "runs ordered by the hash chain(seed, layer, head, i), gaps by chain(seed, layer, head, i, 1)",
      .family = Family::control,
  };

  InnerPolicy of = {};
  std::uint64_t seed = 0;
  std::uint64_t seed_of_policy = 0;

  void parameters(Parameters& p) {
    const auto set = [this](std::string_view text) { return of.set(text, seed_of_policy); };
    p.add("of", of.text, "(POLICY)", set,
          "required: the policy whose kept set is permuted; it must be one-shot (a static set)");
    p.add_seed("seed", seed, "random seed");
  }

  void set_seed(std::uint64_t given) { seed_of_policy = given; }

  std::vector<Source> sources() const { return of.sources(); }

  /// plans() checks whether the policy has a twin, because this depends on the number of layers.
  void check() const {}

  std::vector<LayerPlan> plans(int layers) const {
    if (!of) throw Error{Refusal::usage, "random-twin:of", "no policy", "(POLICY), as in of=(snapkv)", "none"};
    if (const std::string reason = of->why_no_twin(layers); !reason.empty())
      throw Error{Refusal::usage, "random-twin:of", reason, "a one-shot policy (a static set)", of.text};
    std::vector<LayerPlan> all = of->plans(layers);
    for (LayerPlan& of_range : all) {
      Plan& plan = of_range.plan;
      if (plan.allocate->keeps_everything) continue;
      const Needs needs = plan.score.needs;
      plan.score = {.needs = {.last_queries = needs.last_queries, .all_queries = needs.all_queries}};
      plan.nesting = Nesting::none;
      plan.allocate = sets_of(of.policy, [seed = seed](const Kept& kept, int prompt, int layer, int row) {
        return random_twin(kept, prompt, seed, layer, row);
      });
    }
    return all;
  }
};

const Registered<RandomTwin> registered;

}  // namespace
}  // namespace kvreplay
