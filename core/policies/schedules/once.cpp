// When the prompt has been seen, down to B.
#include "policies/plan_part.h"
#include "policies/schedules/schedules.h"

namespace kvreplay {
namespace {

class Once final : public Schedule {
 public:
  std::string name() const override { return "schedule=once"; }
  Decision decided() const override { return Decision::after_prefill; }
};

const RegisteredFixedPart registered{PartKind::schedule, "once", "when the prompt has been seen",
                                     [](Plan& plan) { plan.schedule = once(); }};

}  // namespace

SchedulePtr once() {
  static const auto schedule = std::make_shared<const Once>();
  return schedule;
}

}  // namespace kvreplay
