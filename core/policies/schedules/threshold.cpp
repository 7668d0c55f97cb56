// Evicts down to `keep` tokens whenever `peak` are resident, also after the prompt. Ignores the budget.
#include <fmt/format.h>

#include <algorithm>

#include "error.h"
#include "policies/plan_part.h"
#include "policies/schedules/held_tokens.h"
#include "policies/schedules/schedules.h"

namespace kvreplay {
namespace {

class ThresholdSchedule final : public CuttingSchedule {
 public:
  explicit ThresholdSchedule(const Threshold& at) : at_(at) {}

  std::string name() const override { return "schedule=threshold"; }
  bool goes_on_after_prompt() const override { return true; }
  bool has_budget() const override { return false; }
  int held(int prompt) const override { return at_.keep.of_prompt(prompt); }
  void check(const ScheduledPrompt& prompt) const override { tokens_of(prompt.tokens, prompt.policy); }

 private:
  struct PeakAndKeep {
    int peak = 0;
    int keep = 0;
  };

  PeakAndKeep tokens_of(int prompt, const std::string& who) const {
    const PeakAndKeep found{at_.peak.of_prompt(prompt), at_.keep.of_prompt(prompt)};
    if (found.keep < 1 || found.keep >= found.peak)
      throw Error{Refusal::usage, who, "threshold(peak,keep)", "1 <= keep < peak",
                  fmt::format("peak {}, keep {}", found.peak, found.keep)};
    return found;
  }

  LayerSelection cut(const ScheduledLayer& layer) const override {
    const LayerView& view = layer.view;
    const auto [peak, keep] = tokens_of(view.prompt(), layer.policy);
    HeldTokens tokens(layer);
    const int first = at_.whole_prompt ? std::max(peak, view.prompt()) : peak;
    for (int seen = first; seen <= tokens.tokens(); seen += peak - keep) {
      layer.poll();
      tokens.append_and_cut(seen, keep, keep);
    }
    LayerSelection selection = tokens.finish();
    enter_protected(selection, layer.plan.protect.within(keep, view.prompt(), view.question()), peak);
    return selection;
  }

  Threshold at_;
};

struct ThresholdPart : Threshold {
  static constexpr PartKind kind = PartKind::schedule;
  static constexpr const char* name = "threshold";
  static constexpr const char* summary =
      "evicts down to `keep` tokens whenever `peak` are resident; ignores the budget";

  void parameters(Parameters& p) {
    p.add("peak", peak, "resident tokens that trigger an eviction", UpTo::any, "P");
    p.add("keep", keep, "resident tokens after an eviction", UpTo::any, "P");
    p.add("whole_prompt", whole_prompt, "evicts no token before the end of the prompt");
  }
  void fill(Plan& plan) const { plan.schedule = schedule(); }
};

const RegisteredPart<ThresholdPart> registered;

}  // namespace

SchedulePtr Threshold::schedule() const { return std::make_shared<ThresholdSchedule>(*this); }

}  // namespace kvreplay
