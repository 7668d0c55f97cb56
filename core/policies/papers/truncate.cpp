#include "policies/policy.h"
#include "policies/selectors/rules.h"

namespace kvreplay {
namespace {

struct Truncate {
  static constexpr Card card{
      .name = "truncate",
      .summary =
          "Head and tail of the prompt, half of the budget each; unlike with a truncated text, their keys and values "
          "were "
          "computed with the middle in context",
      .paper = "FINCH, section 6",
      .score =
          "none: a marked question of q tokens (q = 0 without one), and of the tokens before it the first "
          "ceil((B-q)/2) and the last floor((B-q)/2)",
      .family = Family::rule,
  };

  bool keep_question = true;

  void parameters(Parameters& p) {
    const auto read = p.of_part("select");
    p.add("keep_question", keep_question, "keeps a marked question that ends the prompt whole, beside the two halves");
  }

  Plan plan() const { return {.select = head_and_tail(keep_question)}; }
};

const Registered<Truncate> registered;

}  // namespace
}  // namespace kvreplay
