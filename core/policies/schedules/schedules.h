// Schedules with parameters that a policy declares, too.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

enum class Prefill { online, once };

struct OnlineEvictions {
  bool grow = false;
  Prefill prefill = Prefill::online;

  void parameters(Parameters& p);
  Schedule schedule() const;
};

}  // namespace kvreplay
