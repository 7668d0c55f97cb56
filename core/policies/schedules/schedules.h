// Schedules as policies name them in their plans.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// When the prompt has been seen, down to B.
SchedulePtr once();

/// After every `interval` tokens of the prompt, down to B.
SchedulePtr after_every(int interval);

/// Whenever `peak` tokens are held, down to `keep`; also after the prompt. Fractions are read as those of a budget are.
/// There is no other budget.
SchedulePtr threshold(Amount peak, Amount keep);

/// The first and the last tokens by rule: query t sees the sinks and the last B - sinks tokens, itself included.
SchedulePtr rolling();

enum class Prefill { online, once };

/// After each token the lowest score goes while more than B are held.
struct OnlineEvictions {
  bool grow = false;  // after the prompt nothing goes
  Prefill prefill = Prefill::online;

  void parameters(Parameters& p);
  SchedulePtr schedule() const;
};

}  // namespace kvreplay
