#include "policies/selectors/redundancy.h"

#include <algorithm>

#include "policies/plan_part.h"

namespace kvreplay {
namespace {

constexpr Choice<Similarity> use_words[] = {
    {"kv", Similarity::both}, {"key", Similarity::key}, {"value", Similarity::value}};
constexpr Choice<Objective> objective_words[] = {{"min", Objective::least}, {"max", Objective::most}};

struct RedundancyPart : Redundancy {
  static constexpr PartKind kind = PartKind::select;
  static constexpr const char* name = "redundancy";
  static constexpr const char* summary =
      "greedy selection of the tokens least similar to the kept tokens; reads no scores";

  void fill(Plan& plan) const { plan.select = selector(); }
};

const RegisteredPart<RedundancyPart> registered;

}  // namespace

void Redundancy::parameters(Parameters& p) {
  const auto read = p.of_part("select");
  p.add<Similarity>("use", use, use_words, "similarity of keys and values, or of one of them");
  p.add<Objective>("objective", objective, objective_words,
                   "adds the least redundant token at each step, or the most redundant");
}

Selector Redundancy::selector() const {
  const auto select = [*this](const Row& row) {
    const int recent = std::max(row.recent, row.sinks > 0 ? 0 : 1);
    const LayerView& view = *row.view;
    return Kept{view.backend().least_redundant(view.tensors(), {.resident = view.positions(0).numbers(),
                                                                .positions = view.residents().place,
                                                                .keys = use != Similarity::value,
                                                                .values = use != Similarity::key,
                                                                .most_redundant = objective == Objective::most,
                                                                .sinks = row.sinks,
                                                                .recent = recent,
                                                                .keep = row.budget}),
                row.sinks, recent};
  };
  return {.select = select, .reads_scores = false, .reads_layer = true, .one_set = true};
}

}  // namespace kvreplay
