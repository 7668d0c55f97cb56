// Evicts block by block in the context and protects the question at its end (FINCH, section 5).
#pragma once

#include "policies/policy.h"
#include "policies/scores/question_score.h"

namespace kvreplay {

enum class Rate {
  exact,  // floor(k seen / n) resident tokens after each block: k in the end
  code    // floor(block / sigma) more, sigma = ceil(n / k), as the authors' code: below k in the end
};
enum class Order { position, relevance };

struct QuestionBlocks {
  int blocks = 512;
  Order order = Order::position;
  Rate rate = Rate::exact;

  void parameters(Parameters& p);
  SchedulePtr schedule(const Question& question) const;
};

}  // namespace kvreplay
