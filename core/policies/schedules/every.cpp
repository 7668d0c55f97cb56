// After every so many tokens of the prompt, down to B.
#include "policies/plan_part.h"
#include "policies/schedules/blocks.h"
#include "policies/schedules/schedules.h"

namespace kvreplay {
namespace {

class Every final : public BlockSchedule {
 public:
  using BlockSchedule::BlockSchedule;

  std::string name() const override { return "schedule=every"; }

 private:
  Cut cut_at(const BlockEnd& end) const override { return {end.allowed, end.allowed}; }
};

struct EveryPart {
  static constexpr PartKind kind = PartKind::schedule;
  static constexpr const char* name = "every";
  static constexpr const char* summary = "after every `interval` tokens of the prompt, down to B";

  int interval = 512;

  void parameters(Parameters& p) {
    p.add("interval", interval, IntRange{.least = 1}, "tokens of the prompt between cuts");
  }
  void fill(Plan& plan) const { plan.schedule = after_every(interval); }
};

const RegisteredPart<EveryPart> registered;

}  // namespace

SchedulePtr after_every(int interval) { return std::make_shared<Every>(interval); }

}  // namespace kvreplay
