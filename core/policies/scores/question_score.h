// Attention of a question at the end of the prompt to the tokens before it: prompt-guided eviction (FINCH,
// section 5).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// The tokens that form the question.
enum class QuestionFrom {
  marked,  // the marked question that ends the prompt; without one, the last tokens
  last     // the last tokens
};

struct Question {
  QuestionFrom from = QuestionFrom::marked;
  int last_tokens = 32;

  void parameters(Parameters& p);
  /// Its n_q tokens end the prompt.
  EndQuestion ending() const;
};

/// Weight of a row of attention, by the number of keys that it sees.
enum class RowWeight {
  visible,  // visible keys / all keys
  none
};
/// The queries that score.
enum class Condition { question, context, all };

/// [H, n], s_j = sum over rows p of nu_p a_p(j), a over the resident tokens X and the question behind them. With rows
/// of the question nu_p = (#X + p + 1) / (#X + n_q); with rows of the new tokens (the i-th of those after the #C held
/// before) nu_i = (#C + i + 1) / (#X + n_q).
struct QuestionScore {
  Question question = {};
  RowWeight norm = RowWeight::visible;
  Condition condition = Condition::question;

  void parameters(Parameters& p);
  Scorer scorer() const;
};

}  // namespace kvreplay
