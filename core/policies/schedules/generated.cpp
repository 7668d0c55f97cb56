// Evicts generated tokens alone: the prompt is kept, and takes no slots.
#include <fmt/format.h>

#include "policies/plan_part.h"
#include "policies/schedules/held_tokens.h"
#include "policies/schedules/schedules.h"

namespace kvreplay {
namespace {

class GeneratedSchedule final : public CuttingSchedule {
 public:
  GeneratedSchedule(int keep, int interval) : keep_(keep), interval_(interval) {}

  std::string name() const override { return "schedule=generated"; }
  bool goes_on_after_prompt() const override { return true; }
  bool has_budget() const override { return false; }

 private:
  LayerSelection cut(const ScheduledLayer& layer) const override {
    const int prompt = layer.view.prompt();
    HeldTokens tokens(layer, prompt);
    for (int seen = prompt + interval_; seen <= tokens.tokens(); seen += interval_) {
      layer.poll();
      tokens.append_and_cut(seen, prompt + keep_, keep_);
    }
    LayerSelection selection = tokens.finish();
    enter_protected(selection, layer.plan.protect.within(prompt, prompt, layer.view.question()), prompt);
    return selection;
  }

  int keep_, interval_;
};

struct GeneratedPart {
  static constexpr PartKind kind = PartKind::schedule;
  static constexpr const char* name = "generated";
  static constexpr const char* summary =
      "keeps the prompt; evicts down to `keep` generated tokens after every `interval` of them; ignores the budget";

  int keep = 2048;
  int interval = 128;

  void parameters(Parameters& p) {
    p.add("keep", keep, IntRange{.least = 1}, "generated tokens that are resident after an eviction");
    p.add("interval", interval, IntRange{.least = 1}, "generated tokens between evictions");
  }
  void fill(Plan& plan) const { plan.schedule = after_generated(keep, interval); }
};

const RegisteredPart<GeneratedPart> registered;

}  // namespace

SchedulePtr after_generated(int keep, int interval) { return std::make_shared<GeneratedSchedule>(keep, interval); }

}  // namespace kvreplay
