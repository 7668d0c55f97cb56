#include "policies/schedules/question_blocks.h"

#include <cstdint>

#include "policies/plan_part.h"

namespace kvreplay {
namespace {

constexpr Choice<Rate> rate_words[] = {{"exact", Rate::exact}, {"code", Rate::code}};
constexpr Choice<Order> order_words[] = {{"position", Order::position}, {"relevance", Order::relevance}};

int keep_exactly(const BlockEnd& end) {
  return static_cast<int>(static_cast<std::int64_t>(end.budget) * end.seen / end.context);
}

int keep_as_code(const BlockEnd& end) {
  const int sigma = (end.context + end.budget - 1) / end.budget;
  return end.held + end.block / sigma;
}

struct QuestionBlocksPart {
  static constexpr PartKind kind = PartKind::schedule;
  static constexpr const char* name = "question-blocks";
  static constexpr const char* summary = "the context block by block, the question at its end spared";

  QuestionBlocks blocks = {};
  Question question = {};

  void parameters(Parameters& p) {
    blocks.parameters(p);
    question.parameters(p);
  }
  void fill(Plan& plan) const { plan.schedule = blocks.schedule(question); }
};

const RegisteredPart<QuestionBlocksPart> registered;

}  // namespace

void QuestionBlocks::parameters(Parameters& p) {
  const auto read = p.of_part("schedule");
  p.add("blocks", blocks, IntRange{.least = 1}, "tokens of the context in a block");
  p.add<Order>("order", order, order_words, "slots in the order of positions, or of scores");
  p.add<Rate>("rate", rate, rate_words, "held after each block: floor(k seen / n), or as the authors' code rounds");
}

Schedule QuestionBlocks::schedule(const Question& question) const {
  return Blocks{
      .name = "question-blocks",
      .block = blocks,
      .spared = [ending = question.ending()](int prompt, int marked) { return ending.tokens(prompt, marked); },
      .asks_marked_question = question.from == QuestionFrom::marked,
      .keep = rate == Rate::exact ? keep_exactly : keep_as_code,
      .by_relevance = order == Order::relevance};
}

}  // namespace kvreplay
