#include "policies/schedules/question_blocks.h"

#include <cstdint>

#include "policies/plan_part.h"
#include "policies/schedules/blocks.h"

namespace kvreplay {
namespace {

constexpr Choice<Rate> rate_words[] = {{"exact", Rate::exact}, {"code", Rate::code}};
constexpr Choice<Order> order_words[] = {{"position", Order::position}, {"relevance", Order::relevance}};

class QuestionBlockSchedule final : public BlockSchedule {
 public:
  QuestionBlockSchedule(const QuestionBlocks& part, const Question& question)
      : BlockSchedule(part.blocks, part.order == Order::relevance ? Slots::by_relevance : Slots::by_position),
        rate_(part.rate),
        question_(question) {}

  std::string name() const override { return "schedule=question-blocks"; }
  bool spares_question() const override { return true; }
  int spared(int prompt, MarkedQuestion marked) const override {
    return question_.ending().tokens(prompt, marked.begin);
  }
  bool asks_marked_question() const override { return question_.from == QuestionFrom::marked; }

 private:
  Cut cut_at(const BlockEnd& end) const override {
    if (rate_ == Rate::exact)
      return {static_cast<int>(static_cast<std::int64_t>(end.budget) * end.seen / end.context), end.budget};
    const int sigma = (end.context + end.budget - 1) / end.budget;
    return {end.held + end.block / sigma, end.budget};
  }

  Rate rate_;
  Question question_;
};

struct QuestionBlocksPart {
  static constexpr PartKind kind = PartKind::schedule;
  static constexpr const char* name = "question-blocks";
  static constexpr const char* summary =
      "evicts block by block in the context; the question that ends the prompt is protected";

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
  p.add("blocks", blocks, IntRange{.least = 1}, "context tokens per block");
  p.add<Order>("order", order, order_words, "order of the cache slots: by position, or by score");
  p.add<Rate>("rate", rate, rate_words,
              "resident tokens after each block: floor(k seen / n), or rounded as in the authors' code");
}

SchedulePtr QuestionBlocks::schedule(const Question& question) const {
  return std::make_shared<QuestionBlockSchedule>(*this, question);
}

}  // namespace kvreplay
