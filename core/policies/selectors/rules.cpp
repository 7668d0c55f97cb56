#include "policies/selectors/rules.h"

#include <algorithm>
#include <cstdint>

#include "policies/plan_part.h"
#include "positions.h"

namespace kvreplay {
namespace {

Kept strided(const Row& row) {
  Kept kept;
  for (std::int64_t i = 0; i < row.budget; ++i)
    kept.positions.push_back(static_cast<std::int32_t>(i * row.tokens / row.budget));
  return kept;
}

Kept first_and_last(const Row& row) {
  Kept kept{position_range(0, row.sinks), row.sinks, row.recent};
  std::ranges::copy(position_range(row.tokens - row.recent, row.tokens), std::back_inserter(kept.positions));
  return kept;
}

struct HeadAndTail {
  static constexpr PartKind kind = PartKind::select;
  static constexpr const char* name = "head-and-tail";
  static constexpr const char* summary = "first and last tokens, half of the budget each; reads no scores";

  bool keep_question = true;

  void parameters(Parameters& p) {
    p.add("keep_question", keep_question, "keeps a question that ends the prompt whole, beside the two halves");
  }
  void fill(Plan& plan) const { plan.select = head_and_tail(keep_question); }
};

const RegisteredFixedPart registered_stride{PartKind::select, "stride", "every (n/B)-th token; reads no scores",
                                            [](Plan& plan) { plan.select = stride(); }};
const RegisteredPart<HeadAndTail> registered_head_and_tail;

}  // namespace

Selector stride() { return {.select = strided, .reads_scores = false}; }

Selector by_rule_alone() { return {.select = first_and_last, .reads_scores = false, .fills = false}; }

Selector head_and_tail(bool keep_question) {
  const auto select = [keep_question](const Row& row) {
    const int begin = row.view->question().begin;
    const int question = keep_question && begin >= 0 ? std::min(row.tokens - begin, row.budget) : 0;
    const int halves = row.budget - question;
    Kept kept{position_range(0, halves - halves / 2), halves - halves / 2, halves / 2 + question};
    std::ranges::copy(position_range(row.tokens - kept.recent, row.tokens), std::back_inserter(kept.positions));
    // The question ends the prompt, so it forms one range with the last tokens of the context.
    return kept;
  };
  return {.select = select, .reads_scores = false, .reads_layer = true, .of_prompt = true};
}

}  // namespace kvreplay
