// Schedules for the plans of policies.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// One-shot: evicts down to B once, after the prompt.
SchedulePtr once();

/// Evicts down to B after every `interval` prompt tokens.
SchedulePtr after_every(int interval);

/// Evicts down to `keep` tokens whenever `peak` are resident, also after the prompt. Fractions are those of a budget.
/// Ignores the budget.
struct Threshold {
  Amount peak = Amount::tokens(4000);
  Amount keep = Amount::tokens(2000);
  bool whole_prompt = false;  // the first eviction is not before the end of the prompt

  SchedulePtr schedule() const;
};

/// Evicts down to B after the prompt, and after every `interval` of the tokens that follow.
SchedulePtr while_decoding(int interval);

/// Keeps the prompt, and evicts down to `keep` of the tokens after it after every `interval` of them. Ignores the
/// budget.
SchedulePtr after_generated(int keep, int interval);

/// Sinks and a moving recent window: query t sees the sinks and the last B - sinks tokens, itself included.
SchedulePtr rolling();

enum class Prefill { online, once };

/// Evicts the token with the lowest score after each token while more than B are resident.
struct OnlineEvictions {
  bool grow = false;  // evicts nothing after the prompt
  Prefill prefill = Prefill::online;

  void parameters(Parameters& p);
  SchedulePtr schedule() const;
};

}  // namespace kvreplay
