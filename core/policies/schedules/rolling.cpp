// Sinks and a recent window that moves with the query: query t sees the sinks and the last B - sinks tokens, itself
// included.
#include <fmt/format.h>

#include "error.h"
#include "policies/plan_part.h"
#include "policies/schedules/schedules.h"
#include "policies/selection.h"
#include "positions.h"

namespace kvreplay {
namespace {

class Rolling final : public Schedule {
 public:
  std::string name() const override { return "schedule=rolling"; }
  bool goes_on_after_prompt() const override { return true; }

  Requirements required() const override {
    constexpr const char* reason = "schedule=rolling keeps only attention sinks and a recent window";
    constexpr const char* remedy = "streaming-llm or local";
    Requirements all = Schedule::required();
    all.push_back({Property::best_tokens, "schedule=rolling selects the evicted token itself", "select=top-k"});
    all.push_back({Property::all_protected, reason, remedy});
    all.push_back({Property::unscored, reason, remedy});
    return all;
  }

  void check(const ScheduledPrompt& prompt) const override {
    if (prompt.budget.of_seen > 0)
      throw Error{Refusal::usage, prompt.policy, "a rolling window cannot grow: evicted tokens are lost",
                  "a budget without @seen, or schedule=once", fmt::format("{}@seen", prompt.budget.of_seen)};
  }

  LayerSelection run(const ScheduledLayer& layer) const override {
    const auto [sinks, recent] =
        layer.plan.protect.within(layer.budget.tokens, layer.view.prompt(), layer.view.question());
    LayerSelection selection = empty_selection(layer.view, layer.plan.grouping.heads);
    const int tokens = layer.view.tensors().k.tokens;
    for (int row = 0; row < selection.set.rows(); ++row) {
      for (int j = 0; j < tokens; ++j) {
        const int last_query = recent > 0 ? j + recent - 1 : j;
        selection.evicted_at.push_back(j < sinks || last_query >= tokens - 1 ? -1 : last_query);
      }
      // The set that the last prompt query sees.
      for (const std::int32_t position : position_range(0, sinks)) selection.set.keep(row, position);
      for (const std::int32_t position : position_range(layer.view.prompt() - recent, layer.view.prompt()))
        selection.set.keep(row, position);
    }
    enter_protected(selection, {sinks, recent}, layer.budget.tokens);
    return selection;
  }
};

const RegisteredFixedPart registered{PartKind::schedule, "rolling",
                                     "each query sees the attention sinks and the recent window, itself included",
                                     [](Plan& plan) { plan.schedule = rolling(); }};

}  // namespace

SchedulePtr rolling() {
  static const auto schedule = std::make_shared<const Rolling>();
  return schedule;
}

}  // namespace kvreplay
