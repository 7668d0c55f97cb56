// Schedules by name. Their meaning is policies/schedule.h, their execution core/replay.
#include "policies/schedules/schedules.h"

#include "policies/plan_part.h"

namespace kvreplay {
namespace {

constexpr Choice<Prefill> prefill_words[] = {{"online", Prefill::online}, {"once", Prefill::once}};

struct EveryPart {
  static constexpr PartKind kind = PartKind::schedule;
  static constexpr const char* name = "every";
  static constexpr const char* summary = "after every `interval` tokens of the prompt, down to B";

  int interval = 512;

  void parameters(Parameters& p) {
    p.add("interval", interval, IntRange{.least = 1}, "tokens of the prompt between cuts");
  }
  void fill(Plan& plan) const { plan.schedule = Blocks{.block = interval}; }
};

struct ThresholdPart {
  static constexpr PartKind kind = PartKind::schedule;
  static constexpr const char* name = "threshold";
  static constexpr const char* summary = "whenever `peak` tokens are held, down to `keep`; no budget binds it";

  Threshold threshold = {};

  void parameters(Parameters& p) {
    p.add("peak", threshold.peak, "tokens held before a compression", UpTo::any, "P");
    p.add("keep", threshold.keep, "tokens held after it", UpTo::any, "P");
  }
  void fill(Plan& plan) const { plan.schedule = threshold; }
};

struct OnlinePart : OnlineEvictions {
  static constexpr PartKind kind = PartKind::schedule;
  static constexpr const char* name = "online";
  static constexpr const char* summary = "after every token the lowest score goes, by its attention so far or now";

  void fill(Plan& plan) const { plan.schedule = schedule(); }
};

const RegisteredFixedPart registered_once{PartKind::schedule, "once", "when the prompt has been seen",
                                          [](Plan& plan) { plan.schedule = Once{}; }};
const RegisteredPart<EveryPart> registered_every;
const RegisteredPart<ThresholdPart> registered_threshold;
const RegisteredPart<OnlinePart> registered_online;
const RegisteredFixedPart registered_rolling{PartKind::schedule, "rolling",
                                             "each query sees the first and the last tokens by rule, itself included",
                                             [](Plan& plan) { plan.schedule = Rolling{}; }};

}  // namespace

void OnlineEvictions::parameters(Parameters& p) {
  const auto read = p.of_part("schedule");
  p.add("grow", grow, "after the prompt nothing goes: B and the continuation are held");
  p.add<Prefill>("prefill", prefill, prefill_words, "the prompt token by token, or cut once when it has been seen");
}

Schedule OnlineEvictions::schedule() const { return Online{.grow = grow, .prefill_once = prefill == Prefill::once}; }

}  // namespace kvreplay
