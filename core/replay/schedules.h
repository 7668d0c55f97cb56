// Evictions that happen while the tokens come: what is held changes with time.
#pragma once

#include <functional>
#include <string>

#include "replay/selection.h"

namespace kvreplay {

/// What a row may hold: `tokens`, or a share of those seen so far, `tokens` when the prompt has been.
struct Allowance {
  int tokens = 0;
  double of_seen = 0;  // 0: it stands

  int after(int seen) const { return of_seen > 0 ? Amount::fraction(of_seen).of_prompt(seen) : tokens; }
};

/// A layer under one of the schedules other than `Once`. `budget` is less than P where there is one, `who` names the
/// policy in messages. Throws Error{input} for a budget that leaves no room beside the tokens that a schedule spares,
/// and what `poll` throws, which is called before each of its steps.
LayerSelection run_schedule(const LayerView& view, const Plan& plan, Allowance budget, const std::string& who,
                            const std::function<void()>& poll);

/// Whether a schedule holds copies of a layer's keys and values, one for each query head.
bool repeats_heads(const Plan& plan);

/// Peak and keep in tokens of a prompt of P. Throws Error{usage} unless 1 <= keep < peak.
struct PeakAndKeep {
  int peak = 0;
  int keep = 0;
};
PeakAndKeep tokens_of(const Threshold& threshold, int prompt, const std::string& who);

}  // namespace kvreplay
