// Evicts down to B after the prompt, and again whenever `interval` tokens have been generated.
#include "policies/plan_part.h"
#include "policies/schedules/held_tokens.h"
#include "policies/schedules/schedules.h"

namespace kvreplay {
namespace {

class DecodingSchedule final : public CuttingSchedule {
 public:
  explicit DecodingSchedule(int interval) : interval_(interval) {}

  std::string name() const override { return "schedule=decoding"; }
  bool goes_on_after_prompt() const override { return true; }

 private:
  LayerSelection cut(const ScheduledLayer& layer) const override {
    const LayerView& view = layer.view;
    HeldTokens tokens(layer);
    for (int seen = view.prompt(); seen <= tokens.tokens(); seen += interval_) {
      layer.poll();
      const int budget = layer.budget.after(seen);
      tokens.append_and_cut(seen, budget, budget);
    }
    LayerSelection selection = tokens.finish();
    const int budget = layer.budget.tokens;
    enter_protected(selection, layer.plan.protect.within(budget, view.prompt(), view.question()), budget);
    return selection;
  }

  int interval_;
};

struct DecodingPart {
  static constexpr PartKind kind = PartKind::schedule;
  static constexpr const char* name = "decoding";
  static constexpr const char* summary =
      "evicts down to B after the prompt and after every `interval` generated tokens";

  int interval = 512;

  void parameters(Parameters& p) {
    p.add("interval", interval, IntRange{.least = 1}, "generated tokens between evictions");
  }
  void fill(Plan& plan) const { plan.schedule = while_decoding(interval); }
};

const RegisteredPart<DecodingPart> registered;

}  // namespace

SchedulePtr while_decoding(int interval) { return std::make_shared<DecodingSchedule>(interval); }

}  // namespace kvreplay
