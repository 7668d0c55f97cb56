// One-shot: evicts down to B once, after the prompt.
#include "policies/plan_part.h"
#include "policies/schedules/schedules.h"

namespace kvreplay {
namespace {

class Once final : public Schedule {
 public:
  std::string name() const override { return "schedule=once"; }
  Decision decided() const override { return Decision::after_prefill; }
};

const RegisteredFixedPart registered{PartKind::schedule, "once", "one-shot: evicts down to B once, after the prompt",
                                     [](Plan& plan) { plan.schedule = once(); }};

}  // namespace

SchedulePtr once() {
  static const auto schedule = std::make_shared<const Once>();
  return schedule;
}

}  // namespace kvreplay
