// Evicts down to B after every `interval` prompt tokens.
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
  static constexpr const char* summary = "evicts down to B after every `interval` prompt tokens";

  int interval = 512;

  void parameters(Parameters& p) {
    p.add("interval", interval, IntRange{.least = 1}, "prompt tokens between evictions");
  }
  void fill(Plan& plan) const { plan.schedule = after_every(interval); }
};

const RegisteredPart<EveryPart> registered;

}  // namespace

SchedulePtr after_every(int interval) { return std::make_shared<Every>(interval); }

}  // namespace kvreplay
